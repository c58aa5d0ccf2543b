"""The fit beside the training: `scaling.live`.

A thread reads the run's own evals.jsonl after each evaluation, fits, and writes to
TensorBoard and to the run's display.  The loop only wakes it: it never waits for a
fit, and a fit that fails is reported and does not end the run.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from scalerl_jax.scaling.checking import Status
from scalerl_jax.scaling.curves import CurveError
from scalerl_jax.scaling.watch import BOARD_DIRECTORY, Watch

if TYPE_CHECKING:
    from scalerl_jax.config import ScalingConfig

_log = logging.getLogger(__name__)
_END_TIMEOUT_S = 30.0  # for the fit of the last evaluation


class LiveFit:
    """Fits the run's curve in a thread, and says when the run had better end."""

    def __init__(
        self,
        directory: Path,
        *,
        enabled: bool = True,
        stop: Literal["never", "alarm", "plateau"],
        patience: int,
        min_gain: float,
        note: Callable[[str], None] = _log.info,
    ) -> None:
        """Ready to be woken.

        Args:
            directory: of the run.
            enabled: without it nothing is done, whatever is called.
            stop: "alarm": when evaluations fall out of the forecast's band, or the
                curve falls; "plateau": when A is identified and twice the compute
                promises less than `min_gain`; "never".
            patience: consecutive evaluations outside the band that make an alarm.
            min_gain: of pass rate, at the upper end of the forecast's band.
            note: shows a line to whoever follows the run; called from the thread.
        """
        self._watch = Watch(
            path=directory, patience=patience, logdir=directory / BOARD_DIRECTORY
        )
        self._enabled, self._stop, self._min_gain = enabled, stop, min_gain
        self.note = note
        self._told: str | None = None  # the alarm or the obstacle that was shown
        self._reason: str | None = None
        self._wake, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="scaling", daemon=True)

    @property
    def stop_reason(self) -> str | None:
        """Why the run should end now; None: it should not."""
        return self._reason

    def evaluated(self) -> None:
        """An evaluation is in the file; returns at once."""
        self._wake.set()

    def __enter__(self) -> "LiveFit":
        """Start the thread."""
        if self._enabled:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the thread finish the fit of the last evaluation."""
        self._ended = True
        self._wake.set()
        if self._enabled:
            self._thread.join(_END_TIMEOUT_S if kind is None else 0.0)

    def _work(self) -> None:
        while not self._ended:
            self._wake.wait()
            self._wake.clear()
            try:
                status = self._watch.look()
                if status is not None:
                    self._tell(status)
            except CurveError as failure:  # too few evaluations, mostly
                if str(failure) != self._told:
                    self._told = str(failure)
                    self.note(f"scaling.live: {failure}")
            except Exception as failure:  # noqa: BLE001  the run is worth more than it
                self.note(f"warning: scaling.live failed: {failure!r}")
        self._watch.close()

    def _tell(self, status: Status) -> None:
        """One line for the display, and the verdict."""
        if status.fit is None or status.horizon is None or status.forecast_band is None:
            return
        band, result = status.forecast_band, status.fit
        asymptote = f"A {result.asymptote:.3f}" if result.identified else "A open"
        self.note(
            f"scaling: {asymptote}; forecast {status.forecast:.3f} "
            f"[{band.low:.3f}, {band.high:.3f}] at {status.x_name} = "
            f"{status.horizon:.4g}"
        )
        if status.alarm is not None and status.alarm != self._told:
            self._told = status.alarm
            self.note(f"warning: scaling alarm: {status.alarm}")
        if self._stop == "alarm" and status.falling:
            self._reason = status.alarm
        if self._stop == "plateau" and result.identified:
            _, high = result.band(2.0 * status.x_last)
            gain = float(high) - float(result.predict(status.x_last))
            if gain < self._min_gain:
                self._reason = (
                    f"twice the compute promises at most {gain:.4f} more pass rate, "
                    f"less than scaling.min_gain = {self._min_gain:g}"
                )


def live_fit(settings: "ScalingConfig", directory: Path) -> LiveFit:
    """The fit beside a run, by the run's settings (`config.ScalingConfig`)."""
    return LiveFit(
        directory,
        enabled=settings.live,
        stop=settings.stop,
        patience=settings.patience,
        min_gain=settings.min_gain,
    )
