"""Flags of the fitter: the types of their values, and the flags that commands share.

A command's own flags are beside its function, in `__main__`.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalerl_jax.process.ending import Parser
from scalerl_jax.scaling import LAWS, fit_chinchilla, fit_kaplan, fit_kaplan_one
from scalerl_jax.scaling.records import DEFAULT_X, DEFAULT_Y, TOKENS_X

# Laws over model sizes, and of pre-training loss.
SIZE_LAWS = ("tan", "tan_plateau")
LOSS_LAWS: dict[str, Callable[..., Any]] = {
    "kaplan": fit_kaplan,
    "kaplan_one": fit_kaplan_one,
    "chinchilla": fit_chinchilla,
}
MOST = 100_000  # refits
# Fields of `Selection`, `Settings` and `Watch` that flags have shorter names for.
FIELDS = {
    "--map-rewards": "reward_range",
    "--r0": "initial_reward",
    "--from": "fit_from",
    "--until": "horizon",
}


Takes = dict[str, Any]  # argparse options for a flag's value


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag and its help; a name without dashes is a positional argument."""

    name: str
    takes: Takes
    says: str
    default: Any = None


@dataclasses.dataclass(frozen=True)
class Heading:
    """A heading in the help, above the flags that follow it."""

    title: str
    says: str | None = None


Table = tuple[Flag | Heading, ...]


def number(
    metavar: str,
    wanted: str,
    good: Callable[[float], bool],
    kind: Callable[[float], Any] = float,
) -> Takes:
    """Make the options of a flag for a finite number; `wanted` names its range."""

    def read_number(typed: str) -> Any:
        try:
            value = float(typed)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and good(value)):
            raise argparse.ArgumentTypeError(f"{typed!r}: give {wanted}")
        return kind(value)

    return {"metavar": metavar, "type": read_number}


def _condition(typed: str) -> tuple[str, str]:
    """Return the column and the value of COLUMN=VALUE."""
    column, separator, value = typed.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{typed!r}: give COLUMN=VALUE")
    return column, value


def _initial_reward(typed: str) -> float | str:
    """Return a number, or "free"."""
    if typed == "free":
        return typed
    try:
        return float(typed)
    except ValueError as failure:
        raise argparse.ArgumentTypeError(
            f"{typed!r}: give a pass rate in [0, 1], or 'free'"
        ) from failure


SWITCH: Takes = {"action": "store_true"}
COLUMN: Takes = {"metavar": "COLUMN"}
NAME: Takes = {"metavar": "NAME"}
PATH: Takes = {"metavar": "PATH", "type": Path}
PATHS: Takes = {"metavar": "PATH", "type": Path, "nargs": "+"}
NUMBER: Takes = {"metavar": "X", "type": float}
POSITIVE = number("X", "a number above 0", lambda value: value > 0)
POSITIVES = POSITIVE | {"action": "append"}
RATES: Takes = {"metavar": "R", "type": float, "action": "append"}
SHARE = number("SHARE", "a share in (0, 1), such as 0.9", lambda value: 0 < value < 1)
SHARES: Takes = {"metavar": "F", "type": float, "nargs": "+"}
GAIN = number(
    "GAIN",
    "a difference of two pass rates, in (0, 1), such as 0.02",
    lambda value: 0 < value < 1,
)
WIDTH = number("WIDTH", "a number of at least 0", lambda value: value >= 0)
S = number("S", "seconds, a day at most", lambda value: 0 < value <= 86_400)
K = number(
    "K",
    f"a whole number of at least 1, and {MOST:,} at most",
    lambda value: 1 <= value <= MOST and value == int(value),
    int,
)
PORT = number(
    "PORT",
    "a port from 0 (a free one) to 65535",
    lambda value: 0 <= value <= 65_535 and value == int(value),
    int,
)
CONDITION: Takes = {
    "metavar": "COLUMN=VALUE",
    "type": _condition,
    "action": "append",
}
RANGE: Takes = {"metavar": ("LOW", "HIGH"), "type": float, "nargs": 2}
R0: Takes = {"metavar": "R0", "type": _initial_reward}
LAW: Takes = {"metavar": "LAW", "choices": (*LAWS, *SIZE_LAWS, *LOSS_LAWS)}
PROTOCOL: Takes = {"choices": ("default", "paper")}

READABLE = (
    "a run directory with evals.jsonl or trainer_state.json, the folder of an exported "
    "study, a .jsonl, .csv (W&B's chart exports too) or .parquet file or a "
    "trainer_state.json, here or in a bucket "
    "(gs://BUCKET/PATH); or TensorBoard event files here"
)
ALL_PATHS = Flag("paths", PATHS, READABLE)
INPUT: Table = (
    Heading("input"),
    Flag(
        "--x",
        COLUMN,
        f"compute column ({DEFAULT_X}, of a run on a CPU {TOKENS_X}; the file "
        "kind's, or a step)",
    ),
    Flag(
        "--y",
        COLUMN,
        f"pass rate column ({DEFAULT_Y}, or the file kind's); A,B: each is a run",
    ),
    Flag("--wide", SWITCH, "every column of numbers is a run"),
    Flag(
        "--group",
        COLUMN,
        "column whose values tell runs apart; A,B: several columns",
    ),
    Flag("--where", CONDITION, "read these rows only"),
    Flag(
        "--se",
        COLUMN,
        "standard errors of y (<y>_se, if it exists): drawn, and used by --weighted",
    ),
    Flag(
        "--samples",
        COLUMN,
        "instead of --se, number of samples behind a rate: binomial errors",
    ),
    Flag(
        "--map-rewards",
        RANGE,
        "y is a reward from LOW (no success) to HIGH (full): -1 1, or 0 100 for "
        "percent",
    ),
    Flag("--one-minus", SWITCH, "y is an error rate: the pass rate is 1 - y"),
    Flag(
        "--x-scale",
        POSITIVE,
        "compute is X times the column: rollouts of a step, say",
        default=1.0,
    ),
    Flag("--x-name", NAME, "what x is called in the output"),
)
LEVEL = Flag("--level", SHARE, "level of the intervals (%(default)s)", default=0.9)
FITTING: Table = (
    Heading("fitting"),
    Flag(
        "--r0",
        R0,
        "pass rate at zero compute, exactly, or 'free' to leave the point at x = 0 "
        "out (default: fitted, and that point is an observation of it)",
    ),
    Flag("--from", NUMBER, "leave out points with 0 < x < X"),
    Flag(
        "--protocol",
        PROTOCOL,
        "paper: its grids of A and C_mid, unweighted, R0 known, x in GPU-hours; "
        "points from 1.5k on unless --from is given",
        default="default",
    ),
    Flag("--robust", SWITCH, "Huber's loss, against single bad evaluations"),
    Flag("--weighted", SWITCH, "points weigh 1 / standard error^2"),
    Flag(
        "--errors-known",
        SWITCH,
        "take the standard errors as exact; implies --weighted",
    ),
    LEVEL,
    Flag("--json", SWITCH, "print JSON"),
)


def add_flags(parser: Parser, flags: Table) -> None:
    """Add flags to a parser, each under the heading before it."""
    place = parser
    for flag in flags:
        if isinstance(flag, Heading):
            place = parser.add_argument_group(flag.title, flag.says)
            continue
        options = dict(flag.takes)
        if flag.name in FIELDS:
            options["dest"] = FIELDS[flag.name]
        if flag.default is not None:
            options["default"] = flag.default
        place.add_argument(flag.name, help=flag.says, **options)
