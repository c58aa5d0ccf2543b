"""Handle SIGTERM, which announces the preemption of this machine, and Ctrl-C.

A program first calls `end_at_signals`: while it has nothing to save, either signal ends
it at once.  While a `Preemption` is entered, a signal is only recorded, and the program
checks for it once per step; a second Ctrl-C ends the program without saving.  The exit
status is `PREEMPTED` or `INTERRUPTED`.  When started again, the run resumes.  The end
of the terminal (SIGHUP) counts as SIGTERM once there is something to save.

If `jax.distributed` has joined several processes, JAX catches SIGTERM itself and agrees
with the others on one step at which to stop.  Our handler would replace JAX's, so none
is installed.  Every process must then check at every step, or others wait.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, Self

from scalerl_jax.process.ending import INTERRUPTED

PREEMPTED = 75  # exit status, EX_TEMPFAIL of sysexits.h
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ENDED = {
    signal.SIGTERM: (PREEMPTED, b"stopped by SIGTERM with nothing to save\n"),
    signal.SIGINT: (INTERRUPTED, b"interrupted with nothing to save\n"),
}
_ENDED_AT_ONCE = b"interrupted again: ended without saving\n"


def end_at_signals() -> None:
    """Make SIGTERM and Ctrl-C end the process; call it from the main thread."""
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(_watched(_end), warn_on_full_buffer=False)


def _watched(watch: Callable[[socket.socket], None]) -> int:
    """Start a thread that reads signal numbers; return the file they are written to.

    It is a thread, since Python's own handlers wait for a compilation to end.
    """
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    threading.Thread(target=watch, args=(woken,), name="signals", daemon=True).start()
    return wake.detach()


def _end(woken: socket.socket) -> None:
    """End the process at the first of the signals; end with the other socket."""
    with woken:
        while (came := woken.recv(1)) and came[0] not in _SIGNALS:
            pass
    if came:
        status, said = _ENDED[signal.Signals(came[0])]
        os.write(1, said)
        os._exit(status)


def _end_at_second_interrupt(woken: socket.socket) -> None:
    """End the process at the second Ctrl-C; `Preemption` handles the first."""
    interrupts = 0
    with woken:
        while came := woken.recv(1):
            interrupts += came[0] == signal.SIGINT
            if interrupts > 1:
                os.write(1, _ENDED_AT_ONCE)
                os._exit(INTERRUPTED)


class Preemption(contextlib.AbstractContextManager["Preemption"]):
    """Records SIGTERM and Ctrl-C, so that the run saves its state and ends."""

    def __init__(self) -> None:
        """Create it without any effect; entering it installs the handlers."""
        self._came = threading.Event()
        self._distributed = False
        self._handlers: dict[signal.Signals, Any] = {}  # the previous ones
        self._woken = -1  # the previous file for signal numbers
        self.interrupted = False  # the first signal was Ctrl-C

    def __enter__(self) -> Self:
        """Install the signal handlers; call it in the main thread.

        Raises:
            RuntimeError: the current thread is another one.
        """
        jax = sys.modules.get("jax")
        self._distributed = bool(
            jax and jax.distributed.is_initialized() and jax.process_count() > 1
        )
        if self._distributed:
            return self
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "a Preemption was entered in a thread; Python delivers signals to the "
                "main thread only, so enter it there"
            )
        signals = [*_SIGNALS]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under `nohup`
            signals.append(signal.SIGHUP)
        self._handlers = {each: signal.signal(each, self._notice) for each in signals}
        self._woken = signal.set_wakeup_fd(-1)
        if self._woken != -1:  # -1: no `end_at_signals`, as in a notebook
            signal.set_wakeup_fd(
                _watched(_end_at_second_interrupt), warn_on_full_buffer=False
            )
        return self

    def _notice(self, number: int, _: object) -> None:
        """Signal handler: record the signal."""
        if not self._came.is_set():
            self.interrupted = number == signal.SIGINT
        self._came.set()

    def __exit__(self, *_: object) -> None:
        """Restore the previous signal handlers."""
        if self._handlers and self._woken != -1:
            os.close(signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False))
        for number, handler in self._handlers.items():
            # None is a handler that C code installed, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def requested(self) -> bool:
        """True if a signal came, or the step on which all agreed is reached."""
        return self._came.is_set()

    def reached(self, step: int) -> bool:
        """Return True if the run must save and end after optimizer step `step`."""
        if self._distributed:
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                self._came.set()
        return self.requested
