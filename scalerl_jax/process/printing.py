r"""Print text to a terminal without control characters.

Names and texts from run directories, rows and buckets are untrusted.  A terminal obeys
control characters in them: an escape sequence can clear the screen, forge a line or set
the clipboard.  So all output of commands goes through this module, which prints such
characters in escaped form, as \x1b.
"""

import io
import logging
import re
import sys
import traceback
import warnings
from types import TracebackType
from typing import Any

from scalerl_jax.process.common_flags import is_quiet

# C0 except tab and newline, DEL and C1; separators that some programs treat as a line's
# end; marks that change the direction of text; surrogates, which UTF-8 lacks.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029"
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def shown(text: str) -> str:
    r"""Return a text with the characters that a terminal obeys escaped."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def to_stdout(text: str) -> None:
    """Write a command's result to stdout."""
    sys.stdout.write(shown(text))


def to_stderr(text: str) -> None:
    """Write a message that is not part of a command's result to stderr."""
    sys.stderr.write(shown(text))


def clear_terminal() -> None:
    """Clear the screen, if standard output is a terminal."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[H\x1b[2J")


class Stderr(io.TextIOBase):
    """The current `sys.stderr`, for log handlers, since a Progress replaces it."""

    def write(self, text: str) -> int:
        """Write to the current `sys.stderr`."""
        to_stderr(text)
        return len(text)


def log_to_stderr() -> None:
    """Log this package's messages and other libraries' warnings, one line each."""
    guard_terminal()
    # `force`, since other libraries configure logging when they are imported.
    logging.basicConfig(
        format="%(message)s", level=logging.WARNING, stream=Stderr(), force=True
    )
    log_this_package()


def log_this_package() -> None:
    """Log this package's messages; with --quiet only its warnings."""
    level = logging.WARNING if is_quiet() else logging.INFO
    logging.getLogger("scalerl_jax").setLevel(level)


def guard_terminal() -> None:
    """Escape control characters in Python's logs, warnings and tracebacks."""
    logging.setLogRecordFactory(_Record)
    warnings.formatwarning = _shown_warning
    sys.excepthook = _write_traceback


class _Record(logging.LogRecord):
    def getMessage(self) -> str:  # as `logging` calls it
        return shown(super().getMessage())


_format_warning = warnings.formatwarning


def _shown_warning(*found: Any, **more: Any) -> str:
    return shown(_format_warning(*found, **more))


def _write_traceback(
    kind: type[BaseException],
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    to_stderr("".join(traceback.format_exception(kind, error, trace)))
