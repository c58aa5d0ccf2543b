"""A page in a browser that follows runs: `scalerl watch RUN_OR_STUDY... --port=8080`.

The server listens on the loopback address alone.  It reads the runs' files as they grow
and answers two requests: the page, which needs nothing else, and the state of all runs
as JSON, for which the page asks every few seconds.  Texts of runs are not trusted.

One file above 400 lines: its tables of charts and failures are of no use elsewhere.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_jax.formats.reading import read_json
from scalerl_jax.formats.remote import files_of_run
from scalerl_jax.process.printing import to_stdout
from scalerl_jax.run.directory import CONFIG_FILE, METRICS_FILE, ROLLOUTS_FILE
from scalerl_jax.scaling.checking import Status
from scalerl_jax.scaling.live import Watch, num_steps_of
from scalerl_jax.scaling.records import CurveError, amount
from scalerl_jax.scaling.run_details import (
    read_rollouts,
    read_training,
    training_x,
)
from scalerl_jax.scaling.tables import EVALS_NAME, runs_below
from scalerl_jax.scaling.text import cut, show

LOOPBACK = "127.0.0.1"
MOST_RUNS = 64  # on a page
_STUDIES = Path("runs") / "studies"  # where `scalerl study` puts them by name
_STUDY_FILE = "study.json"  # in a study's folder, beside ARM/seedN
_CURVE_POINTS = 80  # at which a fit is drawn
_MOST_SHOWN = 4_000  # characters of a prompt or completion
_MOST_REQUESTS = 32  # at a time
_TIMEOUT_S = 20.0  # for a request to arrive, and for its answer to be taken
_OWN_NAMES = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")  # of a Host
_FILES = (CONFIG_FILE, METRICS_FILE, EVALS_NAME, ROLLOUTS_FILE)


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart of training metrics over compute."""

    title: str
    columns: dict[str, str]  # of metrics.jsonl -> name in the legend


_VERDICTS = "no_answer unparsable too_costly timeout error bad_reward unjudged".split()
CHARTS = (
    Chart("reward", {"reward/mean": "mean"}),
    Chart("staleness (policy lag, optimizer steps)",
          {"staleness/mean": "mean", "staleness/max": "max"}),
    Chart("idle (share of the time)",
          {f"idle/{pool}_share": pool for pool in ("learner", "generators", "all")}),
    Chart("mismatch of sampler and learner (nats)", {"mismatch/mean_abs": "mean"}),
    Chart("length of completions (tokens)", {"completion/mean_tokens": "mean"}),
    Chart("cut off and interrupted (share of completions)",
          {"completion/cut_off_share": "cut off",
           "completion/interrupted_share": "interrupted"}),
    Chart("completions without a plain verdict (share)",
          {f"verifier/{name}_share": name.replace("_", " ") for name in _VERDICTS}),
    Chart("entropy (nats)", {"entropy": "mean"}),
    Chart("gradient norm", {"grad_norm": "norm"}),
    Chart("cosine of gradient and momentum", {"grad_cosine": "cosine"}),
    Chart("effective sample size (share)", {"ratio/effective_sample_size": "share"}),
    Chart("tokens per second", {"throughput/generated_tokens_per_s": "generated",
                                "throughput/trained_tokens_per_s": "trained"}),
)  # fmt: skip
# Counts of failures, of which the page shows those that are not 0.
FAILURES = {
    "train/skipped_steps": "optimizer steps skipped",
    "queue/dropped": "groups dropped as stale",
    "queue/bad_groups": "bad groups",
    "verifier/restarts": "verifiers restarted",
    "sampler/failed": "samples failed",
    "replicas/lost": "replicas lost",
    "replicas/reissued": "groups reissued",
    "learner/restarts": "learner restarts",
}


def find_runs(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the runs to follow by name: those given, and all of studies and folders.

    Raises:
        CurveError: a path holds no run yet, or there are too many.
    """
    found: dict[str, Path] = {}
    for path in paths:
        if not path.exists() and (_STUDIES / path / _STUDY_FILE).is_file():
            path = _STUDIES / path
        is_study = (path / _STUDY_FILE).is_file()
        runs = _runs_of_study(path) if is_study else runs_below(path) or [path]
        for run in runs:
            name = run.name if run is path else str(run.relative_to(path))
            if name in found:
                name = str(run)
            found[name] = run
    if not found:
        raise CurveError(f"{paths[0]}: no run of this study has begun")
    if len(found) > MOST_RUNS:
        raise CurveError(f"{len(found)} runs; a page shows at most {MOST_RUNS}")
    return found


def _runs_of_study(root: Path) -> list[Path]:
    arms = read_json(root / _STUDY_FILE).get("arms")
    names = arms if isinstance(arms, dict) else {}
    return [
        run
        for arm in names
        for run in sorted((root / Path(arm).name).glob("seed*"))
        if (run / CONFIG_FILE).is_file()
    ]


class FollowedRun:
    """A run on the page, read again when its files have changed."""

    def __init__(self, name: str, watch: Watch) -> None:
        """Take the run that `watch` looks at."""
        self.name, self.path, self._watch = name, watch.path, watch
        self._status: Status | None = None
        self._waiting = "no evaluation yet"
        self._seen: tuple[Any, ...] = ()
        self.state: dict[str, Any] = {}

    def refresh(self) -> bool:
        """Read what is new; return whether anything is."""
        try:
            folder = files_of_run(self._watch.path)
        except (OSError, ValueError) as failure:
            return self._set({"name": self.name, "waiting": str(failure)})
        seen = tuple(_stamp(folder / name) for name in _FILES)
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self._status = self._watch.look() or self._status
            self._waiting = ""
        except (CurveError, OSError) as failure:  # too few evaluations, mostly
            self._waiting = str(failure)
        except Exception as failure:  # noqa: BLE001  shown; others are followed on
            self._status, self._waiting = None, f"it cannot be fitted: {failure!r}"
        return self._set(self._read(folder))

    def _set(self, state: dict[str, Any]) -> bool:
        changed, self.state = state != self.state, state
        return changed

    def _read(self, folder: Path) -> dict[str, Any]:
        status = self._status
        # A fit stays on the page when the file can be read no longer, and says so.
        notes = [self._waiting] if status and self._waiting else []
        x_name = status.curve.x_name if status else "generated_tokens"
        columns = {column for chart in CHARTS for column in chart.columns}
        training = read_training(
            folder / METRICS_FILE,
            {name: name for name in (*columns, *FAILURES, "step")}
            | {"x": training_x(x_name)},
            notes,
        )
        steps = training.get("step", np.zeros(1))  # if there are any, one is finite
        step = int(steps[np.isfinite(steps)][-1])
        rollouts = read_rollouts(folder / ROLLOUTS_FILE, notes)
        last = {name: float(training[name][-1]) for name in FAILURES & training.keys()}
        return {
            "name": self.name,
            "step": step,
            "num_steps": num_steps_of(folder),
            "x_name": x_name,
            "training": {
                name: [_plain(value) for value in values]
                for name, values in training.items()
                if name not in FAILURES
            },
            "failures": [
                [FAILURES[name], int(count)]
                for name, count in last.items()
                if math.isfinite(count) and count
            ],
            "rollouts": [
                dataclasses.asdict(each)
                | {
                    name: cut(getattr(each, name), _MOST_SHOWN)
                    for name in ("prompt", "completion", "reference")
                }
                for each in rollouts
                if each.step == rollouts[-1].step
            ],
            "notes": notes,
        } | (_fitted(status) if status else {"waiting": self._waiting})


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _plain(value: float) -> float | None:
    """Return a number that JSON has: six digits, None for NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _fitted(status: Status) -> dict[str, Any]:
    """Return evaluations, curve, band, law and alarm of a run as JSON values."""
    curve, fit = status.curve, status.fit
    state: dict[str, Any] = {
        "points": [
            [_plain(x), _plain(y)] for x, y in zip(curve.x, curve.y, strict=True)
        ],
        "r0": curve.r0,
        "alarm": status.alarm,
        "waiting": status.waiting,
    }
    if fit is None:
        return state
    right = status.horizon if math.isfinite(status.horizon) else 0.0
    grid = np.geomspace(float(curve.x[0]), max(right, fit.x_last), _CURVE_POINTS)
    low, high = fit.band(grid)
    state["curve"] = [
        [_plain(value) for value in row]
        for row in zip(grid, fit.predict(grid), low, high, strict=True)
    ]
    if fit.identified:
        state["law"] = (
            f"A {fit.asymptote:.3f} {show(fit.asymptote_interval, '.3f')}, "
            f"B {fit.exponent:.3g}, C_mid {amount(fit.midpoint)}"
        )
    else:
        state["law"], state["reason"] = "A is not identified", fit.reason
    if fit.climbs:
        state["forecast"] = {
            "x": _plain(status.horizon),
            "text": f"{status.forecast:.3f} {show(status.forecast_band, '.3f')}",
        }
    return state


Find = Callable[[], Mapping[str, Watch]]


class Board:
    """The state of all runs as JSON, made again by a thread while a page is served."""

    def __init__(self, find: Find, *, every_s: float) -> None:
        """Read all runs once; `find` is asked again later, as runs of a study begin.

        Raises:
            CurveError: there are none, or too many.
        """
        self._find, self._every_s = find, every_s
        self.runs: list[FollowedRun] = []
        self._ended = threading.Event()
        self.body, self.tag = b"", ""
        self._thread = threading.Thread(target=self._work, name="page", daemon=True)
        self._read(changed=self._take(find()))

    def refresh(self) -> None:
        """Read what is new of every run."""
        changed = False
        with contextlib.suppress(CurveError, OSError, ValueError):  # keep those before
            changed = self._take(self._find())
        self._read(changed=changed)

    def _read(self, *, changed: bool) -> None:
        if changed | any([run.refresh() for run in self.runs]) or not self.body:
            state = {
                "every_s": self._every_s,
                "charts": [dataclasses.asdict(chart) for chart in CHARTS],
                "runs": [run.state for run in self.runs],
            }
            self.body = json.dumps(state, allow_nan=False).encode()
            self.tag = f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'

    def _take(self, found: Mapping[str, Watch]) -> bool:
        """Follow these runs, new ones last; return whether they are others."""
        kept = [
            run
            for run in self.runs
            if run.name in found and found[run.name].path == run.path
        ]
        known = {run.name for run in kept}
        new = [FollowedRun(*item) for item in found.items() if item[0] not in known]
        changed = bool(new) or len(kept) < len(self.runs)
        self.runs = kept + new
        return changed

    def __enter__(self) -> "Board":
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(self._every_s):
            self.refresh()


@functools.cache
def page() -> bytes:
    """Return the page, which is the same for all runs."""
    return (resources.files("scalerl_jax") / "assets/scaling/live.html").read_bytes()


class Handler(BaseHTTPRequestHandler):
    """Answers with the page or the state, to browsers that were sent here by name."""

    timeout = _TIMEOUT_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # as the library calls it
        """Answer one request."""
        if not _OWN_NAMES.fullmatch(self.headers.get("Host", "")):
            # A page elsewhere whose name was bent to this address (DNS rebinding).
            self._answer(HTTPStatus.FORBIDDEN, b"ask for localhost", "text/plain")
        elif self.path == "/":
            self._answer(HTTPStatus.OK, page(), "text/html; charset=utf-8")
        elif self.path == "/runs.json":
            board = _board_of(self)
            if self.headers.get("If-None-Match") == board.tag:
                self._answer(HTTPStatus.NOT_MODIFIED, b"", "application/json")
            else:
                self._answer(HTTPStatus.OK, board.body, "application/json")
        else:
            self._answer(
                HTTPStatus.NOT_FOUND, b"there is / and /runs.json", "text/plain"
            )

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", _board_of(self).tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header(
            "Content-Security-Policy",
            "default-src 'none'; script-src 'unsafe-inline'; "
            "style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'",
        )
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a page asks every few seconds."""


def _board_of(handler: Handler) -> Board:
    assert isinstance(handler.server, PageServer), "which alone has this handler"
    return handler.server.board


class PageServer(ThreadingHTTPServer):
    """A server on the loopback address, with few requests at a time."""

    daemon_threads = True

    def __init__(self, board: Board, port: int) -> None:
        """Listen; port 0 takes a free one."""
        self.board = board
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)
        super().__init__((LOOPBACK, port), Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; close what is above the limit."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and let another request in."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that is gone; the page asks again."""


@contextlib.contextmanager
def open_page(find: Find, *, port: int, every_s: float) -> Iterator[PageServer]:
    """Listen, and read the runs as they grow; `serve_forever` then answers.

    Raises:
        CurveError: `find` finds no run, or the port is taken, or not for this user.
    """
    with Board(find, every_s=every_s) as board:
        try:
            server = PageServer(board, port)
        except OSError as failure:
            raise CurveError(
                f"--port={port} cannot be used: {failure.strerror}; name another, or 0 "
                f"for a free one"
            ) from failure
        with server:
            yield server


def follow_on_page(find: Find, *, port: int, every_s: float) -> int:
    """Serve the page until Ctrl-C; return the exit status."""
    with open_page(find, port=port, every_s=every_s) as server:
        address = f"http://localhost:{server.server_address[1]}/"
        to_stdout(f"{len(server.board.runs)} runs on {address} until Ctrl-C\n")
        sys.stdout.flush()
        server.serve_forever()
    return 0
