"""Runs of a study: their state, and the runner that starts the missing ones.

All state is read from the runs' own files, so that a study can resume after any
interruption: a run is finished if its last evaluation is at its last step or beyond its
budget.  Runs are `scalerl train` in their own processes, which end with the study's.

One file above 400 lines: starting and stopping runs use the same files.
"""

import contextlib
import dataclasses
import hashlib
import math
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import scalerl_jax
from scalerl_jax.cluster.parent_watch import watching_parent
from scalerl_jax.formats.bounded import last_lines
from scalerl_jax.formats.reading import read_json
from scalerl_jax.launch.outcome import read_outcome
from scalerl_jax.process.child_environment import own_python
from scalerl_jax.process.common_flags import QUIET
from scalerl_jax.process.ending import INTERRUPTED, MISTAKE
from scalerl_jax.process.preemption import PREEMPTED
from scalerl_jax.run.directory import (
    ENDED_FILE,
    EVALS_FILE,
    METRICS_FILE,
    keep_end,
    lock_directory,
)
from scalerl_jax.run.progress import Progress
from scalerl_jax.run.record import (
    git_revision,
    versions,
    with_defaults,
)
from scalerl_jax.run.resume import last_row, sound
from scalerl_jax.run.writing import open_to_append, write_json
from scalerl_jax.scaling.load import load_curves
from scalerl_jax.scaling.pruning import cannot_reach, fit_to_judge
from scalerl_jax.scaling.records import Curve, CurveError
from scalerl_jax.scaling.result import Fit
from scalerl_jax.study.design import (
    LEAST_EVALUATIONS,
    Planned,
    Study,
    check,
    interleaved,
)

STUDY_FILE = "study.json"
FAILED_FILE = "failed.json"
PRUNED_FILE = "pruned.json"
RELEASED_FILE = "released.json"  # of a run whose machines were removed
LOG_FILE = "train.log"
_VERSION = 1  # of STUDY_FILE
# Numbers of an evaluation that say how far its run is.
_EVALUATION = ("step", "pass_rate", "generated_tokens", "compute_chip_hours")
_LOOK_S = 1.0  # between two looks at the runs
_END_S = 60.0  # for a run to save itself and end
_NOTE_S = 60.0  # between two plain lines of progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The state of one run of a study."""

    planned: Planned
    folder: Path
    step: int  # of the last row of its metrics
    evaluation: Mapping[str, Any]  # the last one; empty: none yet
    finished: bool
    failure: str  # why it ended; "": it did not fail
    behind: str  # the arm that it cannot reach, so it was stopped; "": it was not
    steps: int  # of the whole run

    @property
    def share(self) -> float:
        """The finished share of the run, by its steps."""
        return 1.0 if self.finished or self.behind else min(self.step / self.steps, 1.0)


def look(study: Study, root: Path, planned: Planned) -> State:
    """Read the state of a run from the files in its folder."""
    folder = root / planned.name
    evaluation = _last_row(folder / EVALS_FILE, _EVALUATION)
    step = int(_last_row(folder / METRICS_FILE, ("step",)).get("step", 0))
    failure = behind = ""
    if (folder / PRUNED_FILE).exists():
        behind = str(read_json(folder / PRUNED_FILE).get("behind", "unknown"))
    if (folder / FAILED_FILE).exists():
        failure = str(read_json(folder / FAILED_FILE).get("why", "unknown"))
    return State(
        planned=planned,
        folder=folder,
        step=step,
        evaluation=evaluation,
        finished=_has_enough(study, evaluation, folder / EVALS_FILE),
        failure=failure,
        behind=behind,
        steps=study.steps,
    )


def _has_enough(study: Study, evaluation: Mapping[str, Any], file: Path) -> bool:
    """Return whether a run with this last evaluation has used its budget.

    A budget that is used earlier leaves it the evaluations that a fit needs.
    """
    if not evaluation or evaluation["step"] >= study.steps:
        return bool(evaluation)
    used = (
        evaluation["generated_tokens"] >= study.tokens
        or evaluation["compute_chip_hours"] >= study.chip_hours
    )
    least = LEAST_EVALUATIONS + 1  # with the one before the first step
    return used and len(last_lines(file, least)) == least


def unnamed(study: Study, root: Path) -> list[str]:
    """Return a warning if runs in the study's folder are of no arm and seed of it."""
    named = {planned.name for planned in interleaved(study)}
    files = root.glob(f"*/seed*/{EVALS_FILE}")
    found = sorted(file.parent.relative_to(root).as_posix() for file in files)
    others = [name for name in found if name not in named]
    if not others:
        return []
    return [
        f"{root}: {len(others)} of {len(found)} runs are left out, whose arm or seed "
        f"the study does not name: {', '.join(others)}"
    ]


def changed_arms(study: Study, root: Path) -> list[str]:
    """Return a warning if an arm has other settings now than its runs began with."""
    began = read_record(root).get("arms", {})
    try:
        _check_settings(root / STUDY_FILE, began, check(study))
    except ValueError as error:
        return [f"{error}; its runs have the settings that they began with"]
    return []


def _last_row(path: Path, numbers: Sequence[str]) -> dict[str, Any]:
    """Return the last row of a run's file, which has these numbers; {}: no row."""
    mend = "repair the file, or move the run's folder away"
    with sound(path, else_unknown="the state of the run", way_out=mend):
        row = last_row(path)
        for name in numbers if row else ():
            if type(row[name]) not in (int, float) or not abs(row[name]) < math.inf:
                raise TypeError(f"{name} = {row[name]!r} in its last line")
        return row


# ---- the record of a study


def write_record(root: Path, record: dict[str, Any]) -> None:
    """Write the record of a study into its folder."""
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / STUDY_FILE, record)


def next_record(
    study: Study, root: Path, machines: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return the record of a study, checked against that in its folder, and warnings.

    Arms, seeds, pairs and the axis may be added or changed; the settings of an arm with
    runs may not, nor may `machines`, which says where the runs are; none: on this
    machine.  A warning: the code has changed since.

    Raises:
        ValueError: the base, or an arm that has runs, has other settings now, by name;
            or the folder is of another version of studies, or of other machines.
    """
    settings, code = check(study), code_digest()
    record: dict[str, Any] = {
        "version": _VERSION,
        "base": study.base,
        "arms": settings,
        "axis": study.axis,
        "machines": dict(machines or {}),
        "seeds": list(study.seeds),
        "budget": {
            name: value
            for name in ("steps", "tokens", "chip_hours")
            if math.isfinite(value := getattr(study, name))
        },
        "code": [code],
        "git_revision": git_revision(),
        "versions": versions(),
    }
    file, warnings = root / STUDY_FILE, []
    if file.exists():
        old = read_record(root)
        _check_machines(file, old, record["machines"])
        _check_settings(file, old["arms"], settings)
        record["code"] = list(dict.fromkeys([*old["code"], code]))
        record["arms"] = {**old["arms"], **settings}
        if len(record["code"]) > 1:
            warnings.append(
                f"the code has changed since the first run of this study "
                f"({len(record['code'])} states of it so far): runs before and after "
                f"differ in more than their arms"
            )
    return record, warnings


def read_record(root: Path) -> dict[str, Any]:
    """Return the record in a study's folder; {}: there is none.

    Raises:
        ValueError: it is of another version of studies, or broken.
    """
    file = root / STUDY_FILE
    if not file.exists():
        return {}
    found = read_json(file)
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        kind = found.get("version") if isinstance(found, dict) else None
        raise ValueError(
            f"{file} is of version {kind} of studies, and this code reads "
            f"{_VERSION}; choose another --root, or use the code that made it"
        )
    way_out = "repair the file, or choose another --root"
    with sound(file, else_unknown="what its runs began with", way_out=way_out):
        parts = {"arms": dict, "machines": dict, "code": list}
        for name, kind in parts.items():
            if not isinstance(found.setdefault(name, kind()), kind):
                raise TypeError(f"{name} is no {kind.__name__}")
        for arm, settings in found["arms"].items():
            if not isinstance(settings, dict):
                raise TypeError(f"arm {arm} is no dict")
        if not all(isinstance(code, str) for code in found["code"]):
            raise TypeError("code holds more than text")
    return found


def _check_machines(
    file: Path, record: Mapping[str, Any], new: Mapping[str, str]
) -> None:
    old = record["machines"]
    if old != new:
        where, here = (
            ", ".join(f"{name} {value}" for name, value in machines.items() if value)
            or "this machine"
            for machines in (old, new)
        )
        raise ValueError(
            f"{file}: its runs and their checkpoints are on {where}, and this command "
            f"is for {here}; give --launch as before, or choose another --root"
        )


def _check_settings(
    file: Path, old: Mapping[str, Any], new: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise ValueError if an arm's settings are not those that its runs began with.

    A setting that the code did not have then counts as its default, as in a run.
    """
    free = {"seed", "train.num_steps"}
    for arm in old.keys() & new.keys():
        was, now = with_defaults(old[arm]), new[arm]
        changed = {
            name
            for name in was.keys() | now.keys()
            if name not in free and was.get(name) != now.get(name)
        }
        if changed:
            name = min(changed)
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise ValueError(
                f"{file}: arm {arm} was begun with {name} = {was.get(name)!r}, "
                f"and is {now.get(name)!r} now{more}; put it back, or choose "
                f"another --root"
            )


def code_digest() -> str:
    """Return a digest of all Python files of the package."""
    found = hashlib.sha256()
    package = Path(scalerl_jax.__file__).parent
    for file in sorted(package.rglob("*.py")):
        found.update(str(file.relative_to(package)).encode())
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


# ---- running

Command = Callable[[Study, Path, Planned], list[str]]
Release = Callable[[Planned], str]


@dataclasses.dataclass(kw_only=True)
class _Running:
    """A run with a process."""

    planned: Planned
    process: subprocess.Popen[bytes]
    held: contextlib.ExitStack  # its process and its log
    cores: tuple[int, ...]
    enough: bool = False  # it was stopped: its budget is used, or it is hopeless
    status: int | None = None  # exit status, once it has ended
    why: str = ""  # its last line then
    releasing: "_Releasing | None" = None


class _Releasing(threading.Thread):
    """A thread in which a run's machines are removed, which takes minutes."""

    def __init__(self, release: Release, planned: Planned) -> None:
        super().__init__(name=f"release {planned.name}", daemon=True)
        self._release, self._planned = release, planned
        self.left = "it is not known whether its machines are removed"
        self.start()

    def run(self) -> None:
        try:
            self.left = self._release(self._planned)
        except (OSError, RuntimeError, ValueError) as error:
            self.left = f"its machines may remain, and cost: {error}"


def command(
    study: Study, root: Path, planned: Planned, *, more: Sequence[str] = ()
) -> list[str]:
    """Return the command line of a run, which also works by hand.

    `more` are further flags of all runs, which change no setting.
    """
    return [
        *(*own_python(), "-m", "scalerl_jax.main", f"--config={study.base}"),
        f"--workdir={root / planned.name}",
        *more,
        *setting_flags(study, planned),
    ]


def setting_flags(study: Study, planned: Planned) -> list[str]:
    """Return the flags by which a run differs from the base's file."""
    changes = study.changes(planned.arm, planned.seed)
    return [f"--config.{name}={_typed(value)}" for name, value in changes.items()]


def _typed(value: object) -> str:
    """Return a value of a setting as the command line takes it."""
    if isinstance(value, (list, tuple)):
        return repr(tuple(value))
    return str(value)


class Runner:
    """A runner that starts the missing runs of a study, some of them in parallel."""

    def __init__(
        self,
        study: Study,
        root: Path,
        progress: Progress,
        *,
        jobs: int = 1,
        prune: bool = False,
        command: Command = command,
        release: Release | None = None,
        on_cores: bool = True,
    ) -> None:
        """Read the state of all runs; start none yet.

        Args:
            root: the folder of the study.
            jobs: runs at a time; on a CPU they share its cores in equal parts.
            prune: stop a run that cannot reach a finished one of its seed; without it,
                runs that were stopped for that resume.
            command: the command line of a run.
            release: called for a run that failed or was stopped, and not for one that
                the study's own end leaves behind; returns what could not be released.
            on_cores: the work of the runs is done by this machine's cores.
        """
        self._command, self._prune, self._release = command, prune, release
        self._judged: dict[Planned, Fit | None] = {}  # of finished runs
        self._looked: dict[Planned, int] = {}  # the last step that was checked
        self._study, self._root, self._progress = study, root, progress
        self._running: list[_Running] = []
        self._failed: dict[str, str] = {}
        self._mistaken: dict[str, str] = {}  # by arm: its run that cannot start
        self.left: dict[str, str] = {}  # by run: what could not be released
        self.cut: list[str] = []  # runs that a signal has ended
        self._states = {each: look(study, root, each) for each in interleaved(study)}
        self._free: list[tuple[int, ...]] = [()] * jobs
        if on_cores:
            self._free = _shares_of_cores(jobs)

    def run(self, stopped: Callable[[], bool]) -> dict[str, str]:
        """Run the missing runs; return the reasons of failures by the run's name.

        Every run is tried once, including runs that failed in an earlier call, but no
        second one of an arm of which one ended by a mistake in its settings.
        """
        waiting = [
            each
            for each, state in self._states.items()
            if not (state.finished or (state.behind and self._prune))
        ]
        with self._progress.bar(
            "study", total=100 * len(self._states), every_s=_NOTE_S
        ):
            try:
                if self._release:
                    self._release_ended(self._release)
                while (waiting or self._running) and not stopped():
                    while waiting and self._free:
                        if not self._hopeless(waiting[0]):
                            self._start(waiting[0])
                        del waiting[0]
                    time.sleep(_LOOK_S)
                    self._look()
            finally:
                for each in self._running:
                    each.process.poll()
                    each.held.close()  # ends it after it has saved
        return self._failed

    def _hopeless(self, planned: Planned) -> bool:
        """Return whether another seed of the arm has failed by its settings."""
        first = self._mistaken.get(planned.arm)
        if first:
            self._progress.note(
                f"{planned.name} is not started: it has the settings of {first}"
            )
        return bool(first)

    def _start(self, planned: Planned) -> None:
        folder = self._root / planned.name
        folder.mkdir(parents=True, exist_ok=True)
        for name in (FAILED_FILE, PRUNED_FILE, ENDED_FILE, RELEASED_FILE):
            (folder / name).unlink(missing_ok=True)
        _await_end(folder)
        held, cores = contextlib.ExitStack(), self._free.pop()
        log = held.enter_context(open_to_append(folder / LOG_FILE))
        line = self._command(self._study, self._root, planned)
        log.write(f"$ {shlex.join(line)}\n".encode())
        with _on_cores(cores):  # of this thread; its new process inherits them
            process = held.enter_context(
                watching_parent(line, environment=os.environ | {QUIET: ""}, output=log)
            )
        self._running.append(
            _Running(planned=planned, process=process, held=held, cores=cores)
        )

    def _look(self) -> None:
        """Collect ended runs, stop those that need no more, and show all states."""
        for each in list(self._running):
            if each.releasing:
                if not each.releasing.is_alive():
                    self._collect(each)
                continue
            state = look(self._study, self._root, each.planned)
            each.status = each.process.poll()
            if each.status is None and self._prune:
                state = self._stop_hopeless(state)
            self._states[each.planned] = state
            if each.status is None:
                enough = state.finished and state.step < self._study.steps
                if not (enough or state.behind):
                    continue
                each.enough = True
            each.held.close()  # SIGTERM: it saves itself
            each.status = each.process.poll()
            each.why = _why(state.folder / LOG_FILE, each.status)
            failed = each.status not in (0, PREEMPTED, INTERRUPTED)
            if self._release and (each.enough or failed):
                each.releasing = _Releasing(self._release, each.planned)
            else:
                self._collect(each)
        states = self._states.values()
        self._progress.show(
            {
                "runs": f"{sum(each.finished for each in states)}/{len(states)}",
                "now": ", ".join(each.planned.name for each in self._running) or "-",
            },
            done=int(100 * sum(each.share for each in states)),
        )

    def _collect(self, ended: _Running) -> None:
        """Free what a run has held, and tell how it ended."""
        self._running.remove(ended)
        self._free.append(ended.cores)
        state = look(self._study, self._root, ended.planned)
        self._states[ended.planned] = state
        name = state.planned.name
        cut = ended.status in (PREEMPTED, INTERRUPTED) and not ended.enough
        if self._release and not cut:
            self._keep_release(state, ended.releasing.left if ended.releasing else "")
        if ended.enough:
            hopeless = f"it cannot reach {state.behind}" if state.behind else ""
            keep_end(state.folder, hopeless or "the study's budget is used")
        if ended.status == 0 or ended.enough:
            self._progress.note(f"{name}: {_result(self._study, state)}")
        elif cut:
            self.cut.append(name)
        else:
            self._keep_failure(ended, state)

    def _keep_failure(self, ended: _Running, state: State) -> None:
        name, why, status = state.planned.name, ended.why, ended.status
        write_json(state.folder / FAILED_FILE, {"why": why, "status": status})
        keep_end(state.folder, why)
        self._failed[name] = why
        self._progress.note(f"{name} failed: {why}")
        mistake = status == MISTAKE and not state.step
        if mistake and self._release:  # or is it the machines'?
            outcome = read_outcome(str(state.folder))
            mistake = outcome is not None and outcome.state == "mistake"
        if mistake:
            self._mistaken[state.planned.arm] = name

    def _release_ended(self, release: Release) -> None:
        """Release what runs that ended have left, when the study was interrupted."""
        left = [
            (state, _Releasing(release, planned))
            for planned, state in self._states.items()
            if (state.finished or (state.behind and self._prune))
            and (state.folder / LOG_FILE).exists()
            and not (state.folder / RELEASED_FILE).exists()
        ]
        for state, releasing in left:
            releasing.join()
            self._keep_release(state, releasing.left)

    def _keep_release(self, state: State, left: str) -> None:
        """Note that a run has released its machines, or report what it has left."""
        if left:
            self.left[state.planned.name] = left
            self._progress.note(f"warning: {state.planned.name}: {left}")
        else:
            write_json(state.folder / RELEASED_FILE, {})

    def _stop_hopeless(self, state: State) -> State:
        """Mark a run that cannot reach a finished one of its seed; return its state.

        Each evaluation is checked once.
        """
        planned, row = state.planned, state.evaluation
        step = row.get("step", 0)
        if state.finished or step <= self._looked.get(planned, 0):
            return state
        self._looked[planned] = step
        curve = read_curve(self._study, state.folder)
        if isinstance(curve, CurveError):
            return state
        end = float(curve.x[-1]) / _share_used(self._study, row)
        behind = cannot_reach(curve, self._finished_with(planned.seed), end)
        if behind is None:
            return state
        write_json(state.folder / PRUNED_FILE, {"behind": behind, "step": step})
        return look(self._study, self._root, planned)

    def _finished_with(self, seed: int) -> dict[str, Fit]:
        """Return fits of the finished runs of a seed, by arm."""
        for other, state in self._states.items():
            if other.seed == seed and state.finished and other not in self._judged:
                curve = read_curve(self._study, state.folder)
                usable = not isinstance(curve, CurveError)
                self._judged[other] = fit_to_judge(curve) if usable else None
        found = {run.arm: fit for run, fit in self._judged.items() if run.seed == seed}
        return {arm: fit for arm, fit in found.items() if fit is not None}


def read_curve(study: Study, folder: Path) -> Curve | CurveError:
    """Return a run's curve over the study's axis, or the error without a curve."""
    try:
        (curve,) = load_curves(folder, x=study.axis, constant=True)
    except CurveError as error:
        return error
    return curve


def _share_used(study: Study, evaluation: Mapping[str, Any]) -> float:
    """Return the share of its budget that a run has used by an evaluation."""
    return max(
        evaluation["step"] / study.steps,
        evaluation["generated_tokens"] / study.tokens,
        evaluation["compute_chip_hours"] / study.chip_hours,
    )


def _result(study: Study, state: State) -> str:
    """Return the pass rate and step with which a run ended, as text."""
    if state.behind:
        return f"stopped at step {state.step}: it cannot reach {state.behind}"
    if not state.evaluation:
        return "ended without an evaluation"
    rate = state.evaluation["pass_rate"]
    return f"pass rate {rate:.3f} at step {state.evaluation['step']} of {study.steps}"


def _why(log: Path, status: int | None) -> str:
    """Return the last line that a run wrote before it failed."""
    for line in last_lines(log):
        said = line.decode(errors="replace").strip()
        return said.removeprefix("error: ")[:300]
    return f"exit status {status}"


def _await_end(folder: Path) -> None:
    """Wait for a run of a study that was killed: it saves and ends by itself."""
    due_s = time.monotonic() + _END_S
    while time.monotonic() < due_s:
        try:
            lock_directory(folder).close()
        except RuntimeError:  # still used
            time.sleep(_LOOK_S)
        else:
            return


def _shares_of_cores(jobs: int) -> list[tuple[int, ...]]:
    """Split this process's cores into `jobs` equal parts; () each if that fails."""
    if jobs == 1 or not hasattr(os, "sched_getaffinity"):
        return [()] * jobs
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < jobs:
        return [()] * jobs
    each = len(cores) // jobs
    return [tuple(cores[i * each : (i + 1) * each]) for i in range(jobs)]


@contextlib.contextmanager
def _on_cores(cores: tuple[int, ...]) -> Iterator[None]:
    """Pin this thread to cores while the block runs; () does not pin it."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
