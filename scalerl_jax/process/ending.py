"""The end of a command: its exit status and its last message.

An explained failure is reported in one line, a bug by its traceback.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from scalerl_jax.process import full_disk
from scalerl_jax.process.printing import guard_terminal, shown, to_stderr

MISTAKE, FAILURE = 2, 1  # exit statuses: the user's mistake, any other failure
INTERRUPTED = 130  # a shell's status for Ctrl-C


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a wrong flag in one line, like other mistakes."""

    def __init__(self, prog: str | None = None, **settings: Any) -> None:
        """Name the command as the user did: `python -m ...`, or `scalerl ...`."""
        if prog and prog.startswith("python -m ") and sys.argv[0].startswith("scalerl"):
            prog = sys.argv[0]
        super().__init__(prog, **settings)

    def parse_args(self, *given: Any, **named: Any) -> Any:
        """Parse a command line; an unknown flag's error names the command given."""
        flags, unknown = self.parse_known_args(*given, **named)
        if unknown:
            self._given(flags).error(f"unrecognized arguments: {' '.join(unknown)}")
        return flags

    def _given(self, flags: argparse.Namespace) -> argparse.ArgumentParser:
        """Return the parser of the command that was given; without commands, this."""
        commands = self._subparsers._group_actions if self._subparsers else []
        for action in commands:
            if isinstance(action.choices, dict) and action.dest in flags:
                return action.choices[getattr(flags, action.dest)]
        return self

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(shown(message), file)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        said = " ".join(message.split())
        self.exit(MISTAKE, f"error: {said}; {self.prog} --help lists the flags\n")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name, shortened."""
    lines = str(error).strip().splitlines()
    return (lines[0].strip() if lines else type(error).__name__)[:300]


def is_explained(error: BaseException) -> bool:
    """Return True if this package raised the error, with a message for the user."""
    if type(error).__name__ == "JaxRuntimeError":  # its traceback lacks JAX's frames
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    name = frame.f_globals["__name__"]
    return name == "__main__" or name.startswith("scalerl_jax.")


def tell(error: Exception) -> int:
    """Write an explained error to stderr as one line; return the exit status.

    The status is 2 for a mistake in the input, and 1 for a failure while running.  A
    system error that names a file counts as a mistake, unless the disk is full.

    Raises:
        Exception: `error` itself, if it is a bug.
    """
    if full_disk.why_full(error) and not isinstance(error, RuntimeError):
        to_stderr(f"error: {full_disk.sentence(error)}\n")
        _drop_output()
        return FAILURE
    if not isinstance(error, OSError) and not is_explained(error):
        raise error
    to_stderr(f"error: {' '.join(str(error).split())}\n")
    named = isinstance(error, OSError) and error.filename is not None
    return MISTAKE if named or isinstance(error, ValueError) else FAILURE


def answer(command: Callable[[], int | None]) -> int:
    """Return the exit status of a command; explained failures are one line each."""
    guard_terminal()
    try:
        status = command() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        _print_no_more()
        return 0
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        return tell(error)
    except Exception as error:
        if full_disk.why_full(error):  # in a library's own exception
            return tell(error)
        raise
    except KeyboardInterrupt:
        to_stderr("interrupted; nothing half-made was left\n")
        return INTERRUPTED


def _drop_output() -> None:
    """Flush stdout, or discard its buffer: Python's own flush would report an error."""
    try:
        sys.stdout.flush()
    except OSError:
        _print_no_more()


def _print_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
