"""The end of a command: its exit status, and what it says then.

Failures that are answers to the user are told in a line, apart from faults.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from scalerl_jax.process import full_disk
from scalerl_jax.process.printing import guard_terminal, shown, to_stderr

_MISTAKE, _FAILURE, _INTERRUPTED = 2, 1, 130  # exit statuses


class Parser(argparse.ArgumentParser):
    """Answers a wrong flag with one line, as other bad input is answered."""

    def __init__(self, prog: str | None = None, **settings: Any) -> None:
        """Call the command as it was called: by its module, or as `scalerl ...`."""
        if prog and prog.startswith("python -m ") and sys.argv[0].startswith("scalerl"):
            prog = sys.argv[0]
        super().__init__(prog, **settings)

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(shown(message), file)

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        said = " ".join(message.split())
        self.exit(_MISTAKE, f"error: {said}; {self.prog} --help lists the flags\n")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its type's name; cut short."""
    lines = str(error).strip().splitlines()
    return (lines[0].strip() if lines else type(error).__name__)[:300]


def is_explained(error: BaseException) -> bool:
    """Return whether this package raised the error, with a message for the user."""
    if type(error).__name__ == "JaxRuntimeError":  # its own frames are not there
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    name = frame.f_globals["__name__"]
    return name == "__main__" or name.startswith("scalerl_jax.")


def tell(error: Exception) -> int:
    """Write an explained error to stderr as one line; return the exit status.

    2 for a mistake in what was asked for, 1 for a failure on the way.  An error of the
    system's that names a file is a mistake, but for a disk that is full.

    Raises:
        Exception: `error` itself, if it is a fault.
    """
    if full_disk.why_full(error) and not isinstance(error, RuntimeError):
        to_stderr(f"error: {full_disk.sentence(error)}\n")
        _drop_output()
        return _FAILURE
    if not isinstance(error, OSError) and not is_explained(error):
        raise error
    to_stderr(f"error: {' '.join(str(error).split())}\n")
    named = isinstance(error, OSError) and error.filename is not None
    return _MISTAKE if named or isinstance(error, ValueError) else _FAILURE


def answer(command: Callable[[], int | None]) -> int:
    """Return the exit status of a command; explained failures are one line each."""
    guard_terminal()
    try:
        status = command() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads, `head` perhaps, has seen enough
        _print_no_more()
        return 0
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        return tell(error)
    except Exception as error:
        if full_disk.why_full(error):  # as a library says it
            return tell(error)
        raise
    except KeyboardInterrupt:
        to_stderr("interrupted; nothing half-made was left\n")
        return _INTERRUPTED


def _drop_output() -> None:
    """Print what is left, if that can be done: Python would try it later, and tell."""
    try:
        sys.stdout.flush()
    except OSError:
        _print_no_more()


def _print_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
