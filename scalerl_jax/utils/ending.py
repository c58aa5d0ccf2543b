"""The end of a command: its exit status, and what it says then.

Failures that are answers to the user are told in a line, apart from faults.

SIGTERM says that this machine is about to be taken away.  A program calls
`end_at_sigterm` first: as long as there is nothing to save, SIGTERM ends it at once.
While a `Preemption` is entered, it is only noticed, and asked for once per step.
Either way the program ends with the status `PREEMPTED`: start it again, and it goes on.

Where `jax.distributed` has joined several processes, JAX catches SIGTERM itself and
agrees with the others on one step to stop at; a handler of our own would replace that
one, so none is installed.  Every process must then ask at every step, or others wait.
"""

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, Self

_MISTAKE, _FAILURE, _INTERRUPTED = 2, 1, 130  # exit statuses
PREEMPTED = 75  # exit status, EX_TEMPFAIL of sysexits.h
_ENDED = b"stopped by SIGTERM with nothing to save\n"


class Parser(argparse.ArgumentParser):
    """Answers a wrong flag with one line, as other bad input is answered."""

    def __init__(self, prog: str | None = None, **settings: Any) -> None:
        """Call the command as it was called: by its module, or as `scalerl ...`."""
        if prog and prog.startswith("python -m ") and sys.argv[0].startswith("scalerl"):
            prog = sys.argv[0]
        super().__init__(prog, **settings)

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        said = " ".join(message.split())
        self.exit(_MISTAKE, f"error: {said}; {self.prog} --help lists the flags\n")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its type's name; cut short."""
    lines = str(error).strip().splitlines()
    return (lines[0].strip() if lines else type(error).__name__)[:300]


def is_explained(error: BaseException) -> bool:
    """Return whether this package raised it, with a message for the user."""
    if type(error).__name__ == "JaxRuntimeError":  # its own frames are not there
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    name = frame.f_globals["__name__"]
    return name == "__main__" or name.startswith("scalerl_jax.")


def tell(error: Exception) -> int:
    """Write an explained error to stderr as one line; return the exit status.

    2 for a mistake in what was asked for, 1 for a failure on the way.  An error of the
    system's that names a file is a mistake.

    Raises:
        Exception: `error` itself, if it is a fault.
    """
    if not isinstance(error, OSError) and not is_explained(error):
        raise error
    sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
    named = isinstance(error, OSError) and error.filename is not None
    return _MISTAKE if named or isinstance(error, ValueError) else _FAILURE


def answer(command: Callable[[], int | None]) -> int:
    """Return the exit status of a command; explained failures are one line each."""
    try:
        return command() or 0
    except BrokenPipeError:  # whoever reads, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        return tell(error)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing half-made was left\n")
        return _INTERRUPTED


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
