"""Watch a thread that works in steps: how long the current step lasts, and where."""

import sys
import threading
import time
from collections.abc import Callable

_OWN = "scalerl_jax."  # modules of this package


class StepWatch:
    """Records when a thread last ended a step; callable from any thread."""

    def __init__(self, thread: threading.Thread) -> None:
        """Watch a thread, which may be started later."""
        self._thread = thread
        self._ended = time.monotonic()

    def ended(self) -> None:
        """Record that a step has ended."""
        self._ended = time.monotonic()

    def noting(self, stopped: Callable[[], bool]) -> Callable[[], bool]:
        """Return a version of `stopped`, called after each step, that calls `ended`."""

        def asked() -> bool:
            self.ended()
            return stopped()

        return asked

    def hang(self, after_s: float) -> str:
        """Return where the thread is, if its step has lasted `after_s` seconds or more.

        The result is "" otherwise, and for a thread that has ended.
        """
        silent_s = time.monotonic() - self._ended
        if silent_s < after_s or not self._thread.is_alive():
            return ""
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
        return (
            f"the sampling thread {self._thread.name!r} has been in one step since "
            f"{since}, for {silent_s:.0f} s, {_place_of(self._thread)}"
        )


def _place_of(thread: threading.Thread) -> str:
    """Return a thread's innermost position in this package's code, as text."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_OWN):
            return f"in {frame.f_code.co_qualname} ({name}, line {frame.f_lineno})"
        frame = frame.f_back
    return "in no code of this package"
