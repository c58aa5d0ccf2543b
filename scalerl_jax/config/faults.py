"""Explanations of a --config file or flag that could not be read.

The file is a program and may fail in any way; ml_collections reports little of that.
"""

import difflib
import traceback
from collections.abc import Sequence

from absl import flags

from scalerl_jax.config.settings import settings_of

_MODULE = "config_config"  # the name that ml_collections gives the file of --config


def explain(error: BaseException, argv: Sequence[str], settings: type) -> str | None:
    """Return the message for a mistake in a command line; None for any other cause.

    Args:
        error: the exception that the parsing of the flags raised.
        argv: the command line.
        settings: the dataclass that the settings of --config fill.
    """
    if (reason := _of_file(error)) is not None:
        return reason
    if isinstance(error, AttributeError | KeyError):  # --config.NAME is no setting
        cause = error.args[0]
        text = cause.args[0] if isinstance(cause, Exception) else cause
        known = _known(argv, list(settings_of(settings)))
        return f"--config has no such setting: {text}; {known}"
    if isinstance(error, flags.UnrecognizedFlagError):
        near = _near(error.flagname, list(settings_of(settings)))
        meant = f"; settings are --config.SECTION.NAME=VALUE; near: {near}"
        return f"{error}{meant if near else ''}"
    if isinstance(error, flags.Error):
        return str(error)
    return f"--config: {error}" if isinstance(error, OSError) else None


def _of_file(error: BaseException) -> str | None:
    """Return the message for a fault of the config file; None for any other cause."""
    each: BaseException | None = error
    while each is not None:
        # Else of the value of a flag, which the errors around it name.
        if isinstance(each, SyntaxError) and each.filename != "<unknown>":
            return f"--config is no Python file: {each}"
        frames = [*traceback.walk_tb(each.__traceback__)]
        ours = [place for place in frames if place[0].f_globals["__name__"] == _MODULE]
        if ours:
            frame, line = ours[-1]
            if type(each) is ValueError:  # the config's own refusal
                return str(each)
            return (
                f"--config={frame.f_code.co_filename}, line {line}: "
                f"{type(each).__name__}: {each}"
            )
        if "Attribute <class '" in str(each):
            return (
                "--config: get_config in the file returns no ml_collections.ConfigDict "
                "whose settings could be changed"
            )
        if f"module {_MODULE!r} has no attribute 'get_config'" in str(each):
            return "--config names a file without a function get_config; write one"
        if isinstance(each, TypeError) and not isinstance(each, flags.Error):
            # The call itself failed: other arguments, or no function.
            if any(frame.f_code.co_name == "parse" for frame, _ in frames):
                last = str(each).strip().splitlines()[-1]
                return f"--config: get_config cannot be called: {last}"
        each = each.__cause__ or each.__context__
    return None


def _known(argv: Sequence[str], settings: list[str]) -> str:
    """Name the settings of the section that an unknown one is in, or similar ones."""
    prefix = "--config."
    given = [
        arg.removeprefix(prefix).split("=")[0] for arg in argv if arg.startswith(prefix)
    ]
    unknown = next((name for name in given if name not in settings), "")
    section = unknown.rpartition(".")[0]
    if siblings := [name for name in settings if name.startswith(f"{section}.")]:
        return f"choose from {siblings}"
    if near := _near(unknown, settings):
        return f"near: {near}"
    sections = ", ".join(dict.fromkeys(name.partition(".")[0] for name in settings))
    return f"sections and settings of none: {sections}"


def _near(unknown: str, settings: list[str]) -> str:
    """Return the settings whose last word is similar, most similar first."""
    by_last: dict[str, list[str]] = {}
    for name in settings:
        by_last.setdefault(name.rpartition(".")[2], []).append(name)
    close = difflib.get_close_matches(unknown.rpartition(".")[2], by_last)
    return ", ".join(name for last in close for name in by_last[last])
