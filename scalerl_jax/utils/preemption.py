"""SIGTERM, which says that this machine is about to be taken away.

A program calls `end_at_sigterm` first: as long as there is nothing to save, SIGTERM
ends it at once.  While a `Preemption` is entered, it is only noticed, and asked for
once per step.  Either way the program ends with the status `PREEMPTED`: start it again,
and it goes on.

Where `jax.distributed` has joined several processes, JAX catches SIGTERM itself and
agrees with the others on one step to stop at; a handler of our own would replace that
one, so none is installed.  Every process must then ask at every step, or others wait.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from typing import Any, Self

PREEMPTED = 75  # exit status, EX_TEMPFAIL of sysexits.h
_ENDED = b"stopped by SIGTERM with nothing to save\n"


def end_at_sigterm() -> None:
    """Let SIGTERM end the process, with `PREEMPTED`; called from the main thread.

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
        os._exit(PREEMPTED)

    threading.Thread(target=end, name="sigterm", daemon=True).start()


class Preemption(contextlib.AbstractContextManager["Preemption"]):
    """Notices that SIGTERM came; the run then saves its state and ends."""

    def __init__(self) -> None:
        """Notice nothing before it is entered."""
        self._came = threading.Event()
        self._distributed = False
        self._previous: tuple[Any, int] | None = None  # handler and file to wake up

    def __enter__(self) -> Self:
        """Begin to notice SIGTERM, in the main thread.

        Raises:
            RuntimeError: it is another thread.
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
        previous = signal.signal(signal.SIGTERM, lambda *_: self._came.set())
        # None is a handler that C code put there, which Python cannot put back.
        handler = signal.SIG_DFL if previous is None else previous
        self._previous = handler, signal.set_wakeup_fd(-1)
        return self

    def __exit__(self, *_: object) -> None:
        """Give SIGTERM back to whoever had it."""
        if self._previous is not None:
            handler, descriptor = self._previous
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGTERM, handler)

    @property
    def requested(self) -> bool:
        """Return whether SIGTERM came, or the step that all agreed on is reached."""
        return self._came.is_set()

    def reached(self, step: int) -> bool:
        """Return whether the run must save and end after optimizer step `step`."""
        if self._distributed:
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                self._came.set()
        return self.requested
