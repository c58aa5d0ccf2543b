"""Flags that every command of `scalerl` accepts in the same form.

    -q, --quiet       no progress on standard error; warnings, errors and results stay
    --some-flag       the same as --some_flag
    RUN               the run as the first word: `scalerl status runs/x`,
                      `scalerl export runs/x --out=DIR`, or --workdir=RUN

They are rewritten here into the form that the command's own parser expects.
"""

import os
from collections.abc import Sequence

QUIET = "SCALERL_QUIET"  # environment variable; not empty: no progress
# Commands, some with their second word, whose parsers have underscores in flags.
_UNDERSCORES = {"train", "evaluate", "preflight", "simulate", "warmstart", "serve"}
_UNDERSCORES |= {"data difficulty"}
# Command -> the flag for its run or checkpoint; "": a word without a flag.
_RUN = {"train": "workdir", "demo": "workdir"}
_RUN |= dict.fromkeys(("evaluate", "export", "serve"), "checkpoint")
_RUN |= dict.fromkeys(
    ("status", "watch", "report", "fit", "compare", "extrapolate", "plan"), ""
)


def rewritten(command: str, words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the words in the form of a command's parser, and True if -q is among them.

    Words after `--` belong to another command and stay unchanged.

    Raises:
        ValueError: the run or checkpoint is given twice.
    """
    at = words.index("--") if "--" in words else len(words)
    own = [word for word in words[:at] if word not in ("-q", "--quiet")]
    quiet = len(own) < at
    names = {command, " ".join([command, *own[:1]])}
    underscores = not _UNDERSCORES.isdisjoint(names)
    own = [_spelled(word, underscores=underscores) for word in own]
    if command in _RUN:
        own = _with_run(_RUN[command], own)
    return own + list(words[at:]), quiet


def be_quiet() -> None:
    """Turn progress off in this process and in processes that it starts."""
    os.environ[QUIET] = "1"


def is_quiet() -> bool:
    """Return True if progress is turned off."""
    return bool(os.environ.get(QUIET))


def _spelled(word: str, *, underscores: bool) -> str:
    """Return a flag with the hyphens or underscores of the command's parser."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    if "." in name:  # a setting: unchanged
        return word
    old, new = ("-", "_") if underscores else ("_", "-")
    return f"--{name.replace(old, new)}{equals}{value}"


def _with_run(flag: str, words: list[str]) -> list[str]:
    if words and not words[0].startswith("-"):
        for word in words[1:]:
            if flag and word.partition("=")[0] == f"--{flag}":
                raise ValueError(f"{words[0]} and {word} are two; leave one of them")
        return [f"--{flag}={words[0]}", *words[1:]] if flag else words
    if flag == "workdir":
        return words
    start = f"--{flag}=" if flag else ""
    return [
        start + word.removeprefix("--workdir=") if word.startswith("--workdir=")
        else word
        for word in words
    ]  # fmt: skip
