"""Flags that all commands share: what to read, how to fit, and what they stand for."""

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path

from scalerl_jax.scaling.columns import Selection
from scalerl_jax.scaling.curves import DEFAULT_X, DEFAULT_Y, Curve, CurveError
from scalerl_jax.scaling.fit import fit_curve
from scalerl_jax.scaling.load import load_curves
from scalerl_jax.scaling.result import Fit, Settings
from scalerl_jax.utils.failures import Parser

MOST = 100_000  # of refits
SHOW_WARNINGS = ("fit", "report")  # commands that show a curve's with its fit


def selection_from(flags: argparse.Namespace) -> Selection:
    """Which columns and rows the flags choose."""
    return Selection(
        x=flags.x,
        y=flags.y,
        group=flags.group,
        where=tuple(flags.where),
        se=flags.se,
        samples=flags.samples,
        wide=flags.wide,
        reward_range=tuple(flags.map_rewards) if flags.map_rewards else None,
        one_minus=flags.one_minus,
        x_scale=flags.x_scale,
        x_name=flags.x_name,
    )


def settings_from(flags: argparse.Namespace) -> Settings:
    """How the flags want curves fitted."""
    return Settings(
        law=getattr(flags, "law", None) or "sigmoid",
        initial_reward=flags.r0,
        fit_from=flags.start,
        robust=flags.robust,
        protocol=flags.protocol,
        level=flags.level,
        weighted=flags.weighted,
        errors_known=flags.errors_known,
    )


def read(
    flags: argparse.Namespace, selection: Selection | None = None
) -> list[tuple[Path, Curve]]:
    """Every curve of every path, under a name of its own.

    What reading had to say goes to standard error, except where the command shows it
    with each fit.
    """
    selection = selection or selection_from(flags)
    found: list[tuple[Path, Curve]] = []
    taken: set[str] = set()
    for path in flags.paths:
        for curve in load_curves(path, selection=selection):
            name = curve.name
            if name in taken:
                name = f"{path.resolve().parent.name}/{name}"
            for number in itertools.count(2):
                if name not in taken:
                    break
                name = f"{curve.name} ({number})"
            taken.add(name)
            found.append((path, dataclasses.replace(curve, name=name)))
    if flags.command not in SHOW_WARNINGS or selection.constants:
        notes = dict.fromkeys(note for _, curve in found for note in curve.warnings)
        sys.stderr.writelines(f"warning: {note}\n" for note in notes)
    units = {curve.x_name for _, curve in found}
    if len(units) > 1:
        raise CurveError(
            f"the curves are over different x: {', '.join(sorted(units))}; give one "
            "that all have with --x"
        )
    return found


def fit_one(curve: Curve, flags: argparse.Namespace) -> Fit:
    """The fit that the flags ask for; failures name the run."""
    settings = settings_from(flags)
    if settings.weighs and curve.y_se is None:
        raise CurveError(
            f"{curve.name}: no standard errors to weigh by; name their column with "
            "--se, or that of the sample counts with --samples"
        )
    try:
        return fit_curve(curve, settings)
    except CurveError as failure:
        failure.args = (f"{curve.name}: {failure}",)
        raise


def column_flags() -> Parser:
    """What to read: a parent parser of every command."""
    parser = Parser(add_help=False)
    group = parser.add_argument_group("input")
    group.add_argument(
        "--x", help=f"compute column ({DEFAULT_X}, the file kind's, or a step)"
    )
    group.add_argument(
        "--y",
        help=f"pass rate column ({DEFAULT_Y}, or the file kind's); A,B: each is a run",
    )
    group.add_argument(
        "--wide", action="store_true", help="every column of numbers is a run"
    )
    group.add_argument(
        "--group",
        metavar="COLUMN",
        help="column whose values tell runs apart; A,B: several columns",
    )
    group.add_argument(
        "--where",
        action="append",
        default=[],
        type=_condition,
        metavar="COLUMN=VALUE",
        help="read these rows only",
    )
    group.add_argument(
        "--se",
        metavar="COLUMN",
        help="standard errors of y (<y>_se, if there): drawn, and used by --weighted",
    )
    group.add_argument(
        "--samples",
        metavar="COLUMN",
        help="instead, how many samples a rate is the mean of: binomial errors",
    )
    group.add_argument(
        "--map-rewards",
        nargs=2,
        type=float,
        metavar=("LOW", "HIGH"),
        help="y is a reward from LOW (no success) to HIGH (full): -1 1, "
        "or 0 100 for percent",
    )
    group.add_argument(
        "--one-minus",
        action="store_true",
        help="y is an error rate: the pass rate is 1 - y",
    )
    group.add_argument(
        "--x-scale",
        type=above_zero,
        default=1.0,
        metavar="K",
        help="compute is K times the column: rollouts of a step, say",
    )
    group.add_argument("--x-name", help="what x is called in the output")
    return parser


def fitting_flags() -> Parser:
    """How to fit: a parent parser of every command that does."""
    parser = Parser(add_help=False)
    group = parser.add_argument_group("fitting")
    group.add_argument(
        "--r0",
        type=_initial_reward,
        metavar="R0",
        help="pass rate at zero compute, exactly, or 'free' to leave the point at "
        "x = 0 out (default: fitted, and that point is an observation of it)",
    )
    group.add_argument(
        "--from",
        dest="start",
        type=float,
        metavar="X",
        help="leave out points with 0 < x < X",
    )
    group.add_argument(
        "--protocol",
        default="default",
        choices=("default", "paper"),
        help="paper: its grids of A and C_mid, unweighted, x in GPU-hours and from "
        "1.5k on unless --from says else, R0 known",
    )
    group.add_argument(
        "--robust",
        action="store_true",
        help="Huber's loss, against single bad evaluations",
    )
    group.add_argument(
        "--weighted", action="store_true", help="points weigh 1 / standard error^2"
    )
    group.add_argument(
        "--errors-known",
        action="store_true",
        help="take the standard errors at their word; implies --weighted",
    )
    group.add_argument(
        "--level", type=a_share, default=0.9, help="of the intervals (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _condition(text: str) -> tuple[str, str]:
    """COLUMN=VALUE."""
    column, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r}: give COLUMN=VALUE")
    return column, value


def _initial_reward(text: str) -> float | str:
    """A number, or "free"."""
    if text == "free":
        return text
    try:
        return float(text)
    except ValueError as failure:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a pass rate in [0, 1], or 'free'"
        ) from failure


def a_share(text: str) -> float:
    """A number between 0 and 1."""
    return _number(text, lambda value: 0 < value < 1, "a share in (0, 1), such as 0.9")


def above_zero(text: str) -> float:
    """A finite number above 0."""
    return _number(text, lambda value: 0 < value < math.inf, "a number above 0")


def a_wait(text: str) -> float:
    """Seconds above 0, and no more than a day."""
    return _number(text, lambda value: 0 < value <= 86_400, "seconds, a day at most")


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    return _number(text, lambda value: value >= 0, "a number of at least 0")


def a_count(text: str) -> int:
    """A whole number of at least 1, and one that ends."""
    wanted = f"a whole number of at least 1, and {MOST:,} at most"
    return int(_number(text, lambda v: 1 <= v <= MOST and v == int(v), wanted))


def _number(text: str, good: Callable[[float], bool], wanted: str) -> float:
    """What was typed, if it is good."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and good(value)):
        raise argparse.ArgumentTypeError(f"{text!r}: give {wanted}")
    return value
