"""The flags of `python -m scalerl_jax.scaling`."""

import argparse
from collections.abc import Callable
from pathlib import Path

from scalerl_jax.scaling.checking import DEFAULT_ALARM_LEVEL, DEFAULT_PATIENCE
from scalerl_jax.scaling.flags import (
    a_count,
    a_share,
    a_wait,
    above_zero,
    column_flags,
    fitting_flags,
    not_negative,
)
from scalerl_jax.scaling.laws import LAWS
from scalerl_jax.utils.failures import Parser

# Laws over model sizes, and of pre-training loss (`sweeps.py`).
SIZE_LAWS = ("tan", "tan_plateau")
LOSS_LAWS = ("kaplan", "kaplan_one", "chinchilla")
PATHS = (
    "a run directory with evals.jsonl or trainer_state.json, a .jsonl or .csv file "
    "(W&B's chart exports too), a trainer_state.json, or TensorBoard event files"
)


def make_parser() -> Parser:
    """All commands."""
    parser = Parser(
        prog="python -m scalerl_jax.scaling",
        description="Fit, compare, extrapolate and plan by scaling laws of "
        "reinforcement learning. Status 2: the input cannot be used; the message "
        "says how to mend it.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    columns, fitting = column_flags(), fitting_flags()
    paths = Parser(add_help=False)
    paths.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=PATHS)
    for name, (add_flags, short, long) in _commands().items():
        watched = name == "watch"
        add_flags(
            commands.add_parser(
                name,
                help=short,
                description=long,
                parents=[columns] if watched else [paths, columns, fitting],
                usage="%(prog)s RUN_DIR [flags]"
                if watched
                else "%(prog)s PATH [PATH ...] [flags]",
            )
        )
    return parser


def _commands() -> dict[str, tuple[Callable[[Parser], None], str, str]]:
    """By name: what adds its own flags, what it does in short, and at length."""
    return {
        "fit": (
            _fit,
            "fit a law to each curve",
            "Fit R = R0 + (A - R0) / (1 + (C_mid / x)^B), or another law, to each "
            "curve, with intervals, and say so when the curve does not identify A. A "
            "run directory also gets fit.json and fit.png.",
        ),
        "compare": (
            _compare,
            "which recipe scales better",
            "Compare curves two by two by the paper's rule (|A1 - A2| within the "
            "margin: refit both with the mean A and compare B; else A decides) next "
            "to a test with intervals; more than two also as one table.",
        ),
        "extrapolate": (
            _extrapolate,
            "fit the first part, predict the rest",
            "Fit the first 25, 33 and 50 % of the compute by every law, predict the "
            "rest, and rank the laws by that held-out error.",
        ),
        "plan": (
            _plan,
            "compute and cost to a target, gain of doubling, when to stop",
            "From the fit of a curve: the compute and cost to reach a pass rate, what "
            "twice the compute would gain, and where a further unit of compute gains "
            "less than it costs; each with an interval.",
        ),
        "watch": (
            _watch,
            "fit again as a run evaluates; alarm when it leaves its forecast",
            "Follow a run: fit, forecast, and compare each evaluation with what the "
            "first half of the run foretold. Ends with the run, with status 3 if "
            "there was an alarm.",
        ),
        "report": (
            _report,
            "one HTML page of everything, which opens offline",
            "Write one self-contained HTML page: figures, tables, method, warnings "
            "and data of all curves.",
        ),
    }


def _fit(fit: argparse.ArgumentParser) -> None:
    fit.add_argument(
        "--law",
        choices=(*LAWS, *SIZE_LAWS, *LOSS_LAWS),
        metavar="LAW",
        help=f"of one run: {', '.join(LAWS)} (default: sigmoid); over model sizes, "
        f"with --model-size: {', '.join(SIZE_LAWS)} (then the default: tan); of "
        f"pre-training loss, every row a model: {', '.join(LOSS_LAWS)}",
    )
    fit.add_argument(
        "--model-size",
        metavar="COLUMN",
        help="parameters of each run's (for a law of loss, each row's) model: one law "
        "is fitted to all at once",
    )
    fit.add_argument(
        "--sensitivity",
        action="store_true",
        help="also fit from later and later points, as a table",
    )
    fit.add_argument(
        "--bootstrap",
        type=a_count,
        default=0,
        metavar="K",
        help="also K moving-block bootstrap refits",
    )
    fit.add_argument(
        "--pool",
        action="store_true",
        help="the curves are seeds of one recipe: also their mean and spread",
    )
    fit.add_argument("--out", type=Path, help="a .png or .svg of all curves")


def _compare(compare: argparse.ArgumentParser) -> None:
    compare.add_argument(
        "--margin",
        type=not_negative,
        default=0.02,
        help="of A between equal recipes (%(default)s, the paper's)",
    )
    compare.add_argument(
        "--resamples",
        type=a_count,
        default=400,
        metavar="K",
        help="refits of each run for the test (%(default)s)",
    )
    compare.add_argument(
        "--out", type=Path, help="a .png or .svg of the linearised curves"
    )


def _extrapolate(extrapolate: argparse.ArgumentParser) -> None:
    extrapolate.add_argument(
        "--fractions",
        type=float,
        nargs="+",
        metavar="F",
        default=[0.25, 1 / 3, 0.5],
        help="of the last compute that are fitted (0.25 0.33 0.5)",
    )
    extrapolate.add_argument(
        "--model-size",
        metavar="COLUMN",
        help="parameters of each run's model: instead, test Tan et al.'s law over all "
        "runs, within every size and on the largest one",
    )
    extrapolate.add_argument(
        "--num-first",
        type=a_count,
        default=25,
        metavar="K",
        help="with --model-size: evaluations of each run that are fitted (%(default)s)",
    )
    extrapolate.add_argument("--out", type=Path, help="a .png or .svg")


def _plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument(
        "--target",
        type=float,
        action="append",
        metavar="R",
        help="pass rate to reach; may be given again",
    )
    plan.add_argument(
        "--price", type=above_zero, metavar="P", help="cost of one unit of x"
    )
    plan.add_argument(
        "--point-value",
        type=above_zero,
        metavar="V",
        help="what one more point (0.01) of pass rate is worth, in the money of "
        "--price; sets where to stop",
    )
    plan.add_argument(
        "--stop-below",
        type=above_zero,
        metavar="G",
        help="least pass rate per unit of x worth having, instead of these two",
    )
    _sweep(plan)


def _sweep(plan: argparse.ArgumentParser) -> None:
    """A budget: by IsoCompute's sweep over rollouts per prompt, or by Chinchilla."""
    sweep = plan.add_argument_group(
        "sweep (IsoCompute)",
        "with --budget the runs are a sweep over rollouts per prompt, and x is in "
        "rollouts (or is the column step, which is then converted)",
    )
    sweep.add_argument(
        "--budget",
        type=above_zero,
        action="append",
        metavar="C",
        help="rollouts to spend: gives n, B_p and M; may be given again",
    )
    sweep.add_argument("--rollouts-per-prompt", metavar="COLUMN", help="n of each run")
    sweep.add_argument("--prompts-per-step", metavar="COLUMN", help="B_p of each run")
    sweep.add_argument(
        "--bin-width",
        type=not_negative,
        default=0.02,
        help="of the reward bins, wider than an evaluation's noise (%(default)s)",
    )
    loss = plan.add_argument_group(
        "pre-training (Chinchilla)",
        "with --flops every row is a trained model: --model-size, --x tokens, --y loss",
    )
    loss.add_argument(
        "--flops",
        type=above_zero,
        action="append",
        metavar="C",
        help="FLOPs to spend: gives the model size and tokens; may be given again",
    )
    loss.add_argument("--model-size", metavar="COLUMN", help="parameters of each model")


def _watch(watch: argparse.ArgumentParser) -> None:
    watch.add_argument("path", type=Path, metavar="RUN_DIR", help=PATHS)
    watch.add_argument("--once", action="store_true", help="look once and end")
    watch.add_argument(
        "--every",
        type=a_wait,
        default=10.0,
        metavar="S",
        help="seconds between two looks (%(default)g)",
    )
    watch.add_argument(
        "--until",
        type=above_zero,
        metavar="X",
        help="compute to forecast (default: the end of the run where "
        "config.json tells it, else twice the present)",
    )
    watch.add_argument(
        "--patience",
        type=a_count,
        default=DEFAULT_PATIENCE,
        metavar="N",
        help="evaluations in a row outside the band that make an alarm (%(default)s)",
    )
    watch.add_argument(
        "--level", type=a_share, default=0.9, help="of the intervals (%(default)s)"
    )
    watch.add_argument(
        "--alarm-level",
        type=a_share,
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


def _report(report: argparse.ArgumentParser) -> None:
    report.add_argument(
        "--out",
        type=Path,
        default=Path("scaling-report.html"),
        help="the page (%(default)s)",
    )
    report.add_argument("--title", default="Scaling report")
