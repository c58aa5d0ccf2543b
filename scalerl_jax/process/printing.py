r"""Texts on their way to a terminal.

Names and texts of run directories, rows and buckets are other people's.  A terminal
obeys control characters in them: an escape sequence clears the screen, forges a line,
sets the clipboard.  So everything that a command says goes through this module, which
shows such characters, as \x1b, and does not send them.
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

# C0 but for tab and newline, DEL and C1; separators that some take for a line's end;
# what turns the direction of a text around; halves of characters, which UTF-8 lacks.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029"
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def shown(text: str) -> str:
    r"""Return a text in which characters that a terminal obeys are written out."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def to_stdout(text: str) -> None:
    """Write what a command answers."""
    sys.stdout.write(shown(text))


def to_stderr(text: str) -> None:
    """Write what a command says beside its answer."""
    sys.stderr.write(shown(text))


def clear_terminal() -> None:
    """Begin at the top of an empty screen, where standard output is one."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[H\x1b[2J")


class Stderr(io.TextIOBase):
    """Standard error of the moment, for handlers of logs: a Progress takes it over."""

    def write(self, text: str) -> int:
        """Write where `sys.stderr` is now."""
        to_stderr(text)
        return len(text)


def log_to_stderr() -> None:
    """Log this package's messages and other libraries' warnings, one line each."""
    guard_terminal()
    # Other libraries have set up logging when they were imported: `force`.
    logging.basicConfig(
        format="%(message)s", level=logging.WARNING, stream=Stderr(), force=True
    )
    log_this_package()


def log_this_package() -> None:
    """Let through this package's own messages; with --quiet its warnings alone."""
    level = logging.WARNING if is_quiet() else logging.INFO
    logging.getLogger("scalerl_jax").setLevel(level)


def guard_terminal() -> None:
    """Write out control characters in Python's own logs, warnings and tracebacks."""
    logging.setLogRecordFactory(_Record)
    warnings.formatwarning = _shown_warning
    sys.excepthook = _write_traceback


class _Record(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802  as `logging` calls it
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
