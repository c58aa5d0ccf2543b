"""The flags of `python -m scalerl_jax.scaling`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl_jax.scaling.checking import DEFAULT_ALARM_LEVEL, DEFAULT_PATIENCE
from scalerl_jax.scaling.curves import DEFAULT_X, DEFAULT_Y
from scalerl_jax.scaling.laws import LAWS
from scalerl_jax.scaling.load import Selection
from scalerl_jax.scaling.result import Settings

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

PATHS = (
    "a run directory with evals.jsonl or trainer_state.json, a .jsonl or .csv file "
    "(W&B's chart exports too), a trainer_state.json, or TensorBoard event files"
)


def make_parser() -> argparse.ArgumentParser:
    """All commands."""
    parser = argparse.ArgumentParser(
        prog="python -m scalerl_jax.scaling",
        description="Fit, compare, extrapolate and plan by scaling laws of "
        "reinforcement learning. Status 2: the input cannot be used; the message "
        "says how to mend it.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_fit(commands)
    _add_compare(commands)
    _add_extrapolate(commands)
    _add_plan(commands)
    _add_watch(commands)
    _add_report(commands)
    return parser


def selection_from(flags: argparse.Namespace) -> Selection:
    """Which columns and rows the flags choose."""
    return Selection(
        x=flags.x,
        y=flags.y,
        group=flags.group,
        where=tuple(flags.where),
        se=flags.se,
        samples=flags.samples,
        reward_range=tuple(flags.map_rewards) if flags.map_rewards else None,
        x_scale=flags.x_scale,
        x_name=flags.x_name,
    )


def settings_from(flags: argparse.Namespace) -> Settings:
    """How the flags want curves fitted."""
    return Settings(
        law=getattr(flags, "law", "sigmoid"),
        initial_reward=flags.r0,
        fit_from=flags.start,
        robust=flags.robust,
        protocol=flags.protocol,
        level=flags.level,
        errors_known=flags.errors_known,
    )


def _add_fit(commands: "Commands") -> None:
    fit = commands.add_parser(
        "fit",
        help="fit a law to each curve",
        description="Fit R = R0 + (A - R0) / (1 + (C_mid / x)^B), or another law, to "
        "each curve, with intervals, and say so when the curve does not identify A. "
        "A run directory also gets fit.json and fit.png.",
    )
    _add_input(fit)
    _add_fitting(fit)
    fit.add_argument(
        "--sensitivity",
        action="store_true",
        help="also fit from later and later points, as a table",
    )
    fit.add_argument(
        "--bootstrap",
        type=int,
        default=0,
        metavar="K",
        help="also K moving-block bootstrap refits",
    )
    fit.add_argument(
        "--pool",
        action="store_true",
        help="the curves are seeds of one recipe: also their mean and spread",
    )
    fit.add_argument(
        "--model-size",
        metavar="COLUMN",
        help="parameters of each run's model: fit Tan et al.'s law to all runs at once",
    )
    fit.add_argument("--out", type=Path, help="a .png or .svg of all curves")


def _add_compare(commands: "Commands") -> None:
    compare = commands.add_parser(
        "compare",
        help="which recipe scales better",
        description="Compare curves two by two by the paper's rule (|A1 - A2| within "
        "the margin: refit both with the mean A and compare B; else A decides) next "
        "to a test with intervals; more than two also as one table.",
    )
    _add_input(compare)
    _add_fitting(compare, law=False)
    compare.add_argument(
        "--margin",
        type=float,
        default=0.02,
        help="of A between equal recipes (%(default)s, the paper's)",
    )
    compare.add_argument(
        "--resamples",
        type=int,
        default=400,
        metavar="K",
        help="refits of each run for the test (%(default)s)",
    )
    compare.add_argument(
        "--out", type=Path, help="a .png or .svg of the linearised curves"
    )


def _add_extrapolate(commands: "Commands") -> None:
    extrapolate = commands.add_parser(
        "extrapolate",
        help="fit the first part, predict the rest",
        description="Fit the first 25, 33 and 50 % of the compute by every law, "
        "predict the rest, and rank the laws by that held-out error.",
    )
    _add_input(extrapolate)
    _add_fitting(extrapolate, law=False)
    extrapolate.add_argument(
        "--fractions",
        type=float,
        nargs="+",
        metavar="F",
        default=[0.25, 1 / 3, 0.5],
        help="of the last compute that are fitted",
    )
    extrapolate.add_argument("--out", type=Path, help="a .png or .svg")


def _add_plan(commands: "Commands") -> None:
    plan = commands.add_parser(
        "plan",
        help="compute and cost to a target, gain of doubling, when to stop",
        description="From the fit of a curve: the compute and cost to reach a pass "
        "rate, what twice the compute would gain, and where a further unit of compute "
        "gains less than it costs; each with an interval.",
    )
    _add_input(plan)
    _add_fitting(plan, law=False)
    plan.add_argument(
        "--target",
        type=float,
        action="append",
        metavar="R",
        help="pass rate to reach; may be given again",
    )
    plan.add_argument("--price", type=float, metavar="P", help="cost of one unit of x")
    plan.add_argument(
        "--point-value",
        type=float,
        metavar="V",
        help="what one more point (0.01) of pass rate is worth, in the money of "
        "--price; sets where to stop",
    )
    plan.add_argument(
        "--stop-below",
        type=float,
        metavar="G",
        help="least pass rate per unit of x worth having, instead of these two",
    )
    _add_sweep(plan)


def _add_sweep(plan: argparse.ArgumentParser) -> None:
    """IsoCompute: a budget, by a sweep over rollouts per prompt."""
    sweep = plan.add_argument_group(
        "sweep (IsoCompute)",
        "with --budget the runs are a sweep over rollouts per prompt, and x is in "
        "rollouts (or is the column step, which is then converted)",
    )
    sweep.add_argument(
        "--budget",
        type=float,
        action="append",
        metavar="C",
        help="rollouts to spend: gives n, B_p and M; may be given again",
    )
    sweep.add_argument("--rollouts-per-prompt", metavar="COLUMN", help="n of each run")
    sweep.add_argument("--prompts-per-step", metavar="COLUMN", help="B_p of each run")
    sweep.add_argument(
        "--bin-width",
        type=float,
        default=0.02,
        help="of the reward bins, wider than an evaluation's noise (%(default)s)",
    )


def _add_watch(commands: "Commands") -> None:
    watch = commands.add_parser(
        "watch",
        help="fit again as a run evaluates; alarm when it leaves its forecast",
        description="Follow a run: fit, forecast, and compare each evaluation with "
        "what the first half of the run foretold. Ends with the run, with status 3 "
        "if there was an alarm.",
    )
    _add_input(watch, several=False)
    watch.add_argument("--once", action="store_true", help="look once and end")
    watch.add_argument(
        "--every",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds between two looks (%(default)g)",
    )
    watch.add_argument(
        "--until",
        type=float,
        metavar="X",
        help="compute to forecast (default: the end of the run where "
        "config.json tells it, else twice the present)",
    )
    watch.add_argument(
        "--patience",
        type=int,
        default=DEFAULT_PATIENCE,
        metavar="N",
        help="evaluations in a row outside the band that make an alarm (%(default)s)",
    )
    watch.add_argument(
        "--level", type=float, default=0.9, help="of the intervals (%(default)s)"
    )
    watch.add_argument(
        "--alarm-level",
        type=float,
        default=DEFAULT_ALARM_LEVEL,
        help="of the band that evaluations are held against (%(default)s)",
    )
    watch.add_argument(
        "--logdir",
        type=Path,
        help="of TensorBoard (default for a directory: tensorboard/scaling in it)",
    )
    watch.add_argument(
        "--no-tensorboard", action="store_true", help="show it in the terminal only"
    )


def _add_report(commands: "Commands") -> None:
    report = commands.add_parser(
        "report",
        help="one HTML page of everything, which opens offline",
        description="Write one self-contained HTML page: figures, tables, method, "
        "warnings and data of all curves.",
    )
    _add_input(report)
    _add_fitting(report, law=False)
    report.add_argument(
        "--out",
        type=Path,
        default=Path("scaling-report.html"),
        help="the page (%(default)s)",
    )
    report.add_argument("--title", default="Scaling report")


def _add_input(parser: argparse.ArgumentParser, *, several: bool = True) -> None:
    """What to read."""
    if several:
        parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=PATHS)
    else:
        parser.add_argument("path", type=Path, metavar="RUN_DIR", help=PATHS)
    group = parser.add_argument_group("input")
    group.add_argument("--x", help=f"compute column ({DEFAULT_X}, or the file kind's)")
    group.add_argument(
        "--y", help=f"pass rate column ({DEFAULT_Y}, or the file kind's)"
    )
    group.add_argument(
        "--group", metavar="COLUMN", help="column whose values tell runs apart"
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
        "--se", metavar="COLUMN", help="standard errors of y (<y>_se, if there)"
    )
    group.add_argument(
        "--samples",
        metavar="COLUMN",
        help="how many samples a rate is the mean of: binomial errors",
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
        "--x-scale",
        type=float,
        default=1.0,
        metavar="K",
        help="compute is K times the column: rollouts of a step, say",
    )
    group.add_argument("--x-name", help="what x is called in the output")


def _add_fitting(parser: argparse.ArgumentParser, *, law: bool = True) -> None:
    """How to fit."""
    group = parser.add_argument_group("fitting")
    if law:
        group.add_argument(
            "--law",
            default="sigmoid",
            choices=sorted(LAWS),
            help="which law (%(default)s)",
        )
    group.add_argument(
        "--r0",
        type=_initial_reward,
        metavar="R0",
        help="pass rate at zero compute, or 'free' to fit it (default: "
        "the point at x = 0; without one it is fitted)",
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
        help="paper: its grid of A and C_mid, unweighted",
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
        "--level", type=float, default=0.9, help="of the intervals (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


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
