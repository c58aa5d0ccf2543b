"""Watching a run from outside: read, fit and show again whenever it evaluates.

The run itself is neither touched nor asked: its files are read as they grow.
"""

import contextlib
import dataclasses
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from scalerl_jax.scaling.checking import (
    DEFAULT_ALARM_LEVEL,
    DEFAULT_PATIENCE,
    Status,
    assess,
    scalars,
)
from scalerl_jax.scaling.checking import to_text as status_text
from scalerl_jax.scaling.columns import Selection
from scalerl_jax.scaling.curves import Curve, CurveError
from scalerl_jax.scaling.load import load_curve
from scalerl_jax.utils.reading import read_json

if TYPE_CHECKING:
    from scalerl_jax.scaling.board import Board

BOARD_DIRECTORY = Path("tensorboard") / "scaling"  # inside a run directory
CONFIG_NAME = "config.json"
_CLEAR = "\x1b[H\x1b[2J"


@dataclasses.dataclass(kw_only=True)
class Watch:
    """One watched run: reads it, remembers its alarm, writes to TensorBoard."""

    path: Path
    selection: Selection = Selection()
    horizon: float | None = None  # compute to forecast; None: to the run's end
    patience: int = DEFAULT_PATIENCE
    level: float = 0.9
    alarm_level: float = DEFAULT_ALARM_LEVEL
    logdir: Path | None = None  # of TensorBoard; None: nowhere
    alarm: str | None = None  # the first that was given
    falling: bool = False  # of any alarm so far
    seen: int = 0  # points at the last look
    at_end: bool = False  # the run has made its last step
    board: "Board | None" = None  # opened by the first evaluation

    def look(self) -> Status | None:
        """The state of the run; None if it has no new evaluation.

        Raises:
            CurveError: there is no curve (yet).
        """
        curve = load_curve(self.path, selection=self.selection)
        if curve.x.size == self.seen:
            return None
        self.seen = curve.x.size
        num_steps = _num_steps(self.path)
        self.at_end = (
            num_steps is not None
            and curve.last_step is not None
            and curve.last_step >= num_steps
        )
        status = assess(
            curve,
            horizon=self.horizon or _end_of_run(curve, num_steps),
            patience=self.patience,
            level=self.level,
            alarm_level=self.alarm_level,
        )
        self.falling |= status.falling
        self.alarm = self.alarm or status.alarm
        status = dataclasses.replace(status, alarm=status.alarm or self.alarm)
        if self.logdir is not None:
            self._write(curve, status)
        return status

    def _write(self, curve: Curve, status: Status) -> None:
        from scalerl_jax.scaling.axes import to_png
        from scalerl_jax.scaling.board import Board
        from scalerl_jax.scaling.forecast_figure import draw_status

        png = None if status.fit is None else to_png(draw_status(status))
        step = curve.last_step if curve.last_step is not None else curve.x.size
        assert self.logdir is not None, "asked by look"
        self.board = self.board or Board(self.logdir)
        self.board.write(step, scalars(status), png)

    def close(self) -> None:
        """Close the files."""
        if self.board is not None:
            self.board.close()


def _num_steps(path: Path) -> int | None:
    """How many optimizer steps a run of this package will make; None if not told."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        settings = read_json(path / CONFIG_NAME)
        return int(settings["config"]["train"]["num_steps"])
    return None


def _end_of_run(curve: Curve, num_steps: int | None) -> float | None:
    """Compute at the last step, at the present compute per step; None: unknown."""
    if num_steps is None or not curve.last_step or curve.last_step >= num_steps:
        return None
    return float(curve.x[-1]) * num_steps / curve.last_step


def watch(
    run: Watch,
    *,
    every_s: float,
    once: bool,
    stream: TextIO | None = None,
    clock: threading.Event | None = None,
) -> int:
    """Show a run until it ends; returns the exit status, 3 after an alarm.

    With `once`, looks once and raises CurveError if there is nothing to fit; else
    waits for what is not there yet.

    Args:
        run: what to watch.
        every_s: seconds between two looks.
        once: look once.
        stream: where to show it; standard output by default.
        clock: its `wait` passes the time between two looks.
    """
    shown, clock = stream or sys.stdout, clock or threading.Event()
    waiting = ""
    with contextlib.closing(run):
        while True:
            try:
                status = run.look()
            except CurveError as failure:
                if once:
                    raise
                if str(failure) != waiting:
                    waiting = str(failure)
                    shown.write(f"waiting: {waiting}\n")
            else:
                if status is not None:
                    shown.write(_CLEAR if shown.isatty() and not once else "")
                    shown.write(status_text(status))
                    if once and status.waiting is not None:
                        raise CurveError(status.waiting)
                if once or run.at_end:
                    return 3 if run.alarm else 0
            shown.flush()
            clock.wait(every_s)
