"""Whether this machine is about to be taken away: SIGTERM, asked once per step.

A program calls `end_at_sigterm` first: as long as there is nothing to save, SIGTERM
ends it at once, with status 0.  While a `Preemption` is installed, it is only noticed.

Where `jax.distributed` has joined several processes, JAX catches SIGTERM itself and
agrees with the others on one step to stop at; a handler of our own would replace that
one, so none is installed.  Every process must then ask at every step, or others wait.
"""

import os
import signal
import socket
import threading
from types import FrameType, TracebackType
from typing import Any

_ENDED = b"stopped by SIGTERM with nothing to save\n"


def end_at_sigterm() -> None:
    """Let SIGTERM end the process, with status 0; called from the main thread.

    A thread does it, since Python's own handlers wait for a compilation to end.
    """
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(wake.detach(), warn_on_full_buffer=False)

    def end() -> None:
        while signal.SIGTERM not in woken.recv(1):
            pass
        os.write(1, _ENDED)
        os._exit(0)

    threading.Thread(target=end, name="sigterm", daemon=True).start()


class Preemption:
    """Notices that SIGTERM came; the run then saves its state and ends."""

    def __init__(self) -> None:
        """Notices nothing before `install`."""
        self._came = threading.Event()
        self._installed = False
        self._distributed = False
        self._previous: Any = signal.SIG_DFL
        self._previous_fd = -1

    def install(self) -> None:
        """Begin to notice SIGTERM; called from the main thread."""
        self._distributed = _has_others()
        if self._distributed or self._installed:
            return
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "Preemption.install was called in a thread; Python delivers signals "
                "to the main thread only, so call it there"
            )
        previous = signal.signal(signal.SIGTERM, self._on_signal)
        # None is a handler that C code put there, which Python cannot put back.
        self._previous = signal.SIG_DFL if previous is None else previous
        self._previous_fd = signal.set_wakeup_fd(-1)
        self._installed = True

    @property
    def requested(self) -> bool:
        """Whether SIGTERM came, or the processes agreed on a step and reached it."""
        return self._came.is_set()

    def reached(self, step: int) -> bool:
        """Whether the run must save and end after optimizer step `step`."""
        if self._distributed:
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                self._came.set()
        return self.requested

    def close(self) -> None:
        """Give SIGTERM back to whoever had it."""
        if self._installed:
            signal.set_wakeup_fd(self._previous_fd)
            signal.signal(signal.SIGTERM, self._previous)
            self._installed = False

    def __enter__(self) -> "Preemption":
        """Install."""
        self.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give SIGTERM back."""
        self.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._came.set()


def _has_others() -> bool:
    import jax

    return jax.distributed.is_initialized() and jax.process_count() > 1
