"""Monitoring of a run under way: its fit, its forecast, and an alarm (`checking.py`).

`watch` runs outside the training and reads the run's files as they grow.  `LiveFit`
runs inside it (`scaling.live`): a thread that the loop only wakes after an evaluation.
The loop never waits for a fit, and a fit that fails is reported and does not end a run.
Both write to TensorBoard.
"""

import contextlib
import dataclasses
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from scalerl_jax.formats.remote import files_of_run
from scalerl_jax.process.printing import clear_terminal, to_stdout
from scalerl_jax.run.directory import why_ended
from scalerl_jax.scaling.checking import (
    DEFAULT_ALARM_LEVEL,
    DEFAULT_PATIENCE,
    Status,
    assess,
    scalars,
    to_text,
)
from scalerl_jax.scaling.load import Selection, load_curve
from scalerl_jax.scaling.plots import draw_status, to_png
from scalerl_jax.scaling.records import (
    CurveError,
    HeaderError,
    SeveralCurvesError,
    amount,
)
from scalerl_jax.scaling.run_settings import read_settings
from scalerl_jax.scaling.text import show

if TYPE_CHECKING:
    from scalerl_jax.config import ScalingConfig
    from scalerl_jax.run.events import EventFile

_log = logging.getLogger(__name__)

BOARD_DIRECTORY = Path("tensorboard") / "scaling"  # inside a run directory
_END_TIMEOUT_S = 30.0  # for the fit of the last evaluation
_MOST_STEPS = 2**53  # of a run that a file announces


@dataclasses.dataclass(kw_only=True)
class Watch:
    """One watched run: reads it, remembers its alarm, writes to TensorBoard."""

    path: Path
    selection: Selection = Selection()
    horizon: float | None = None  # compute to forecast; None: to the run's end
    patience: int = DEFAULT_PATIENCE
    level: float = 0.9
    alarm_level: float = DEFAULT_ALARM_LEVEL
    logdir: Path | None = None  # of TensorBoard; None: it is not written
    alarm: str | None = None  # the first alarm of the run
    falling: bool = False  # whether any alarm so far was of a fall
    # At the last look: points, the last one's step and rate.  Of two evaluations at
    # one compute the later one replaces the other, so their number may stay.
    seen: tuple[int, int | None, float] | None = None
    at_end: bool = False  # the run has made its last step
    ended: str = ""  # why it has ended before
    board: "EventFile | None" = None  # opened by the first evaluation

    def look(self) -> Status | None:
        """Return the state of the run; None if it has no new evaluation.

        Raises:
            CurveError: there is no curve (yet).
        """
        path = files_of_run(self.path)
        self.ended = why_ended(path)  # before the curve, which is whole then
        curve = load_curve(path, selection=self.selection)
        end, last = num_steps_of(path), curve.last_step
        newest = curve.x.size, last, float(curve.y[-1]) if curve.y.size else 0.0
        if newest == self.seen:
            return None
        self.seen = newest
        self.at_end = end is not None and last is not None and last >= end
        horizon = self.horizon
        if horizon is None and end and last and last < end:
            horizon = float(curve.x[-1]) * end / last  # at the present compute per step
        status = assess(
            curve,
            horizon=horizon,
            patience=self.patience,
            level=self.level,
            alarm_level=self.alarm_level,
        )
        self.falling |= status.falling
        self.alarm = self.alarm or status.alarm
        status = dataclasses.replace(status, alarm=status.alarm or self.alarm)
        if self.logdir is not None:
            self._show(status, step=curve.x.size if last is None else last)
        return status

    def _show(self, status: Status, *, step: int) -> None:
        """Write numbers and a picture to TensorBoard; they are on disk on return."""
        from tensorboard.compat.proto import summary_pb2

        from scalerl_jax.run.events import EventFile  # TensorBoard too

        # Message classes are made at import, where a type checker cannot see them.
        summary = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        assert self.logdir is not None, "`look` asks"
        self.logdir.mkdir(parents=True, exist_ok=True)
        self.board = self.board or EventFile(self.logdir)
        values: list[Any] = [
            summary.Value(tag=f"scaling/{name}", simple_value=value)
            for name, value in scalars(status).items()
        ]
        if status.fit is not None:
            png = to_png(draw_status(status))
            width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
            image = summary.Image(
                encoded_image_string=png, width=width, height=height, colorspace=4
            )
            values.append(summary.Value(tag="scaling/fit", image=image))
        self.board.write(step=step, summary=summary(value=values))

    def close(self) -> None:
        """Close the files."""
        if self.board is not None:
            self.board.close()


def num_steps_of(path: Path) -> int | None:
    """Read the number of optimizer steps that a run will make; None: unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = read_settings(path)["train"]["num_steps"]
        if type(found) is int and 0 < found <= _MOST_STEPS:
            return found
    return None


def watch(
    run: Watch,
    *,
    every_s: float,
    once: bool,
    clock: threading.Event | None = None,
) -> int:
    """Show a run until it ends; returns the exit status, 3 after an alarm.

    With `once`, looks once and raises CurveError if there is nothing to fit; otherwise
    waits until there is, unless a table's header has no column of compute, or there are
    several curves.

    Args:
        every_s: seconds between two looks.
        clock: its `wait` passes the time between two looks.
    """
    clock = clock or threading.Event()
    waiting = ""
    with contextlib.closing(run):
        while True:
            waiting = _look(run, once=once, waiting=waiting)
            if run.ended:
                to_stdout(f"the run has ended: {run.ended}\n")
            if once or run.at_end or run.ended:
                return 3 if run.alarm else 0
            sys.stdout.flush()
            clock.wait(every_s)


def _look(run: Watch, *, once: bool, waiting: str) -> str:
    """Print what is new of a run; return what it waits for, told once."""
    try:
        status = run.look()
    except CurveError as failure:
        if once or isinstance(failure, HeaderError | SeveralCurvesError):
            raise
        if str(failure) != waiting:
            to_stdout(f"waiting: {failure}\n")
        return str(failure)
    if status is not None:
        if not once:
            clear_terminal()
        to_stdout(to_text(status))
        if once and status.waiting is not None:
            raise CurveError(status.waiting)
    return waiting


class LiveFit:
    """A thread that fits the run's curve, and reports when the run should end."""

    def __init__(
        self,
        settings: "ScalingConfig",
        directory: Path,
        *,
        note: Callable[[str], None] = _log.info,
    ) -> None:
        """Make the thread that `__enter__` starts.

        Args:
            settings: `stop` = "alarm": when evaluations fall out of the forecast's
                band, or the curve falls; "plateau": when A is identified and the upper
                end of that band promises less than `min_gain` for twice the compute.
            note: shows a line to the user; called from the thread.
        """
        patience, logdir = settings.patience, directory / BOARD_DIRECTORY
        self._watch = Watch(path=directory, patience=patience, logdir=logdir)
        self._settings = settings
        self.note = note
        self._told: str | None = None  # the last alarm or obstacle shown
        self.stop_reason: str | None = None  # why the run should end now
        self._wake, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="scaling", daemon=True)

    def evaluated(self) -> None:
        """Wake the thread: an evaluation is in the file.  Returns at once."""
        self._wake.set()

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the thread has finished the fit of the last evaluation."""
        self._ended = True
        self._wake.set()
        self._thread.join(_END_TIMEOUT_S if kind is None else 0.0)

    def _work(self) -> None:
        ended = False
        while not ended:
            self._wake.wait()
            self._wake.clear()
            ended = self._ended  # before the look, which then sees the last evaluation
            try:
                status = self._watch.look()
                if status is not None:
                    self._tell(status)
            except CurveError as failure:  # too few evaluations, mostly
                if str(failure) != self._told:
                    self._told = str(failure)
                    self.note(f"scaling.live: {failure}")
            except Exception as failure:  # noqa: BLE001  a fit must not end the run
                self.note(f"warning: scaling.live failed: {failure!r}")
        self._watch.close()

    def _tell(self, status: Status) -> None:
        """Note the fit in a line, and stop the run if the settings ask for it."""
        result = status.fit
        if result is None:
            return
        asymptote = f"A {result.asymptote:.3f}" if result.identified else "A open"
        self.note(
            f"scaling: {asymptote}; forecast {status.forecast:.3f} "
            f"{show(status.forecast_band, '.3f')} at {result.x_name} = "
            f"{amount(status.horizon)}"
        )
        if status.alarm is not None and status.alarm != self._told:
            self._told = status.alarm
            self.note(f"warning: scaling alarm: {status.alarm}")
        if self._settings.stop == "alarm" and status.falling:
            self.stop_reason = status.alarm
        if self._settings.stop == "plateau" and result.identified:
            _, high = result.forecast_band(2.0 * result.x_last)
            gain = float(high) - float(result.predict(result.x_last))
            if gain < self._settings.min_gain:
                self.stop_reason = (
                    f"twice the compute promises at most {gain:.4f} more pass rate, "
                    f"less than scaling.min_gain = {self._settings.min_gain:g}"
                )
