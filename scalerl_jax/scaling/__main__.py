"""The command line: `scalerl {fit,compare,...} --help`.

Every command is a function in COMMANDS: `@command` gives it its flags, and its
docstring is its help.  It takes the parsed flags and returns an `Answer`, whose text is
made in `text.py` and whose pictures are made in `plots.py`.  Input that cannot be used
ends with one message and status 2.

One file above 400 lines: the flags of each command are beside the code that reads them.
"""

import argparse
import collections
import dataclasses
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from scalerl_jax import scaling
from scalerl_jax.formats.remote import URL, files_of_run, send_back
from scalerl_jax.process.ending import INTERRUPTED, Parser, answer
from scalerl_jax.process.full_disk import naming
from scalerl_jax.process.printing import shown, to_stderr, to_stdout
from scalerl_jax.run.writing import replace_file
from scalerl_jax.scaling import LAWS, Curve, CurveError, Fit, Settings, plots, text
from scalerl_jax.scaling.bootstrap import fitted_rates
from scalerl_jax.scaling.checking import DEFAULT_ALARM_LEVEL, DEFAULT_PATIENCE
from scalerl_jax.scaling.compare import FEWEST_RECIPES
from scalerl_jax.scaling.differences import RUN_SD
from scalerl_jax.scaling.flags import (
    ALL_PATHS,
    COLUMN,
    FIELDS,
    FITTING,
    GAIN,
    INPUT,
    LAW,
    LEVEL,
    LOSS_LAWS,
    NAME,
    PATH,
    PATHS,
    PORT,
    POSITIVE,
    POSITIVES,
    RATES,
    SHARE,
    SHARES,
    SIZE_LAWS,
    SWITCH,
    WIDTH,
    Flag,
    Heading,
    K,
    S,
    Table,
    add_flags,
)
from scalerl_jax.scaling.live import BOARD_DIRECTORY, Watch
from scalerl_jax.scaling.live import watch as follow
from scalerl_jax.scaling.live_page import find_runs, follow_on_page
from scalerl_jax.scaling.load import load_columns, when_enough
from scalerl_jax.scaling.power import plan_power
from scalerl_jax.scaling.recipes import compare_recipes, group_runs, seeds_of
from scalerl_jax.scaling.records import Array, Record, TooFewPointsError, to_json
from scalerl_jax.scaling.report import make_report
from scalerl_jax.scaling.search import R0
from scalerl_jax.scaling.tables import EVALS_NAME, is_step, runs_below, unit_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Flags = argparse.Namespace
Curves = list[tuple[Path, Curve]]

# Fields of the flags for one curve's fit, and of those that make curves from rows.
# Laws over sizes do not read the former; laws of loss read neither.
ONE_RUN_FLAGS = (
    *("initial_reward", "fit_from", "protocol", "robust", "weighted", "errors_known"),
    *("se", "samples", "sensitivity", "bootstrap", "pool", "out"),
)
CURVE_FLAGS = ("group", "wide", "reward_range", "one_minus")
SHOW_WARNINGS = ("fit", "report")  # commands that show a curve's warnings with its fit
VERDICTS = ("compare", "report")  # commands in which a dead run counts for its recipe
PICTURES = (".png", ".svg")
FRACTIONS = (0.25, 1 / 3, 0.5)  # shares of the last compute that are fitted
# Ends of the names of this package's axes; none of them counts rollouts.
OWN_AXES = ("generated_tokens", "train_tokens", "train_flops", "chip_hours")


@dataclasses.dataclass
class Answer:
    """A command's text, its record for JSON, and the files that it wrote."""

    said: str
    record: Any  # what `to_json` takes
    written: Sequence[Path | str] = ()  # str: a path in a bucket


Run = Callable[[Flags], Answer | int]
T = TypeVar("T")


# ---- commands, and their parser

COMMANDS: dict[str, tuple[Run, str, Table]] = {}  # function, short help, flags


def command(
    short: str,
    *own: Flag | Heading,
    path: Flag = ALL_PATHS,
    shared: Table = INPUT + FITTING,
) -> Callable[[Run], Run]:
    """Register a function as a command; its docstring is the long help."""

    def add(run: Run) -> Run:
        COMMANDS[run.__name__] = run, short, (path, *own, *shared)
        return run

    return add


def make_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="python -m scalerl_jax.scaling",
        description="Fit, compare, extrapolate and plan by scaling laws of "
        "reinforcement learning. Status 2: the input cannot be used; the message "
        "says how to mend it.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (run, short, table) in COMMANDS.items():
        usage, says = "%(prog)s PATH [PATH ...] [flags]", inspect.getdoc(run)
        added = commands.add_parser(name, help=short, description=says, usage=usage)
        add_flags(added, table)
    return parser


# ---- reading and fitting


def _from_flags(kind: Callable[..., T], flags: Flags) -> T:
    """Return a dataclass made from the flags that are named as its fields."""
    fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    given = {field.name: getattr(flags, field.name, None) for field in fields}
    return kind(**{name: value for name, value in given.items() if value is not None})


def _each_run(paths: Sequence[Path]) -> list[Path]:
    """Return the paths as local ones; for a directory of runs, each of its runs."""
    local = [files_of_run(path) for path in paths]
    return [run for path in local for run in runs_below(path) or [path]]


def _load_all(
    flags: Flags, selection: scaling.Selection, constants: tuple[str, ...]
) -> Curves:
    """Return the curves of all paths; warn of a path without one if others have one."""
    loaded: Curves = []
    unusable: list[CurveError] = []
    given = _each_run(flags.paths)
    for path in given:
        try:
            curves = scaling.load_curves(path, selection=selection, constants=constants)
        except CurveError as failure:
            if len(given) == 1 or not path.exists():
                raise
            if str(path) not in str(failure):
                failure.args = (f"{path}: {failure}",)
            unusable.append(failure)
            continue
        loaded += [(path, curve) for curve in curves]
    found = _under_unique_names(loaded)
    _tell_left_out(unusable, found, flags)
    return found


def _under_unique_names(curves: Curves) -> Curves:
    """Name those of equal names by the directories that they are in, too."""
    alike = collections.Counter(curve.name for _, curve in curves)
    found: dict[str, tuple[Path, Curve]] = {}
    for path, curve in curves:
        name = curve.name
        if alike[name] > 1:
            name = shown(f"{path.resolve().parent.name}/{name}")
        title = name
        for number in itertools.count(2):
            if title not in found:
                break
            title = f"{name} ({number})"
        found[title] = path, dataclasses.replace(curve, name=title)
    return list(found.values())


def _tell_left_out(
    unusable: Sequence[CurveError], found: Sequence[Any], flags: Flags
) -> None:
    """Print why runs are left out; raise the first reason if too few are left.

    `flags.left_out` has them for the page of `report`.
    """
    if unusable and len(found) < (2 if flags.command == "compare" else 1):
        raise unusable[0]
    told = [f"a run is left out: {each}" for each in unusable]
    flags.left_out = [*getattr(flags, "left_out", []), *told]
    to_stderr(text.warned(told))


def read(flags: Flags, **settings: str | None) -> Curves:
    """Read every curve of every path, under a unique name.

    The reader's notes go to standard error, unless the command shows them with each
    fit.

    Args:
        settings: columns of the runs' settings by the flags that name them.
    """
    missing = [f"--{n.replace('_', '-')}" for n, c in settings.items() if c is None]
    if missing:
        raise CurveError(
            "the runs' settings are asked for: name their columns with "
            f"{' and '.join(missing)}"
        )
    constants = tuple(column for column in settings.values() if column is not None)
    selection = dataclasses.replace(
        _from_flags(scaling.Selection, flags), constant=flags.command in VERDICTS
    )
    found = _load_all(flags, selection, constants)
    if flags.command not in SHOW_WARNINGS or constants:
        notes = dict.fromkeys(note for _, curve in found for note in curve.warnings)
        to_stderr(text.warned(list(notes)))
    for units in (
        {curve.x_name for _, curve in found},
        {unit_of(curve.x_column) for _, curve in found},  # --x-name makes none alike
    ):
        if len(units) > 1:
            raise CurveError(
                f"the curves are over different x: {', '.join(sorted(units))}; give "
                "one that all have with --x; columns of one unit need one name"
            )
    return found


def fit_one(curve: Curve, flags: Flags) -> Fit:
    """Fit a curve with the settings of the flags."""
    settings = _from_flags(Settings, flags)
    if settings.weighs and curve.y_se is None:
        raise CurveError(
            "no standard errors to weigh by; name their column with --se, or that of "
            "the sample counts with --samples"
        )
    return scaling.fit_curve(curve, settings)


def fit_each(flags: Flags) -> list[tuple[Path, Fit]]:
    """Fit every curve; of several, those that cannot be fitted are left out by name."""
    return [(path, fit) for path, _, fit in of_each(flags, fit_one)]


def of_each(
    flags: Flags, answer: Callable[[Curve, Flags], T]
) -> list[tuple[Path, str, T]]:
    """Return path, name and answer of every curve; failures name the run.

    Of several curves, those without an answer are left out.
    """
    curves = read(flags)
    found: list[tuple[Path, str, T]] = []
    unusable: list[CurveError] = []
    for path, curve in curves:
        try:
            found.append((path, curve.name, answer(curve, flags)))
        except CurveError as failure:
            few = isinstance(failure, TooFewPointsError)
            when = when_enough(path, failure.missing) if few else ""
            failure.args = (f"{curve.name}: {failure}{when}",)
            if len(curves) == 1:
                raise
            unusable.append(failure)
    _tell_left_out(unusable, found, flags)
    return found


def _one_or_all(records: list[Any]) -> Any:
    """Return one result as an object, several as a list of them."""
    return records[0] if len(records) == 1 else records


def _named(name: str, result: Any) -> dict[str, Any]:
    """Return the record of a result, its run's name in front."""
    return {"name": name, **result.to_record()}


def _check_out(path: Path | None, endings: tuple[str, ...] = PICTURES) -> None:
    """Raise CurveError if a file cannot be written, before anything is computed."""
    if path is None:
        return
    if path.suffix not in endings:
        raise CurveError(
            f"--out {path}: give a name that ends in {' or '.join(endings)}"
        )
    if not path.resolve().parent.is_dir():
        raise CurveError(f"--out {path}: there is no directory {path.parent}; make it")


def _save(figure: "Figure", path: Path) -> Path:
    to_bytes = plots.to_png if path.suffix == ".png" else plots.to_svg
    data = to_bytes(figure)
    with naming(path):
        replace_file(path, data)
    return path


# ---- the commands


@command(
    "fit a law to each curve",
    Flag(
        "--law",
        LAW,
        f"of one run: {', '.join(LAWS)} (default: sigmoid); over model sizes, with "
        f"--model-size: {', '.join(SIZE_LAWS)} (then the default: tan); of "
        f"pre-training loss, every row a model: {', '.join(LOSS_LAWS)}",
    ),
    Flag(
        "--model-size",
        COLUMN,
        "parameters of each run's (for a law of loss, each row's) model: one law "
        "is fitted to all at once",
    ),
    Flag("--sensitivity", SWITCH, "also fit from later and later points, as a table"),
    Flag("--bootstrap", K, "also K moving-block bootstrap refits"),
    Flag(
        "--pool",
        SWITCH,
        "the curves are seeds of one recipe, or of each that their files name: also "
        "their mean and spread",
    ),
    Flag("--out", PATH, "a .png or .svg of all curves"),
)
def fit(flags: Flags) -> Answer:
    """Fit a scaling law to each curve, with intervals.

    R = R0 + (A - R0) / (1 + (C_mid / x)^B), or another law.  Says so when the curve
    does not identify A.  A run directory also gets fit.json and fit.png.
    """
    _check_out(flags.out)
    if flags.law in LOSS_LAWS:
        return _fit_loss(flags, flags.law)
    if flags.model_size is not None or flags.law in SIZE_LAWS:
        return _fit_sizes(flags)
    texts, records = [], []
    fits: dict[str, Fit] = {}
    written: list[Path | str] = []
    by_path = itertools.groupby(fit_each(flags), lambda each: each[0])
    for path, each in by_path:
        own = {result.curve.name: result for _, result in each}
        fits |= own
        said = [_with_extras(result, flags) for result in own.values()]
        texts += [words for words, _ in said]
        records += [record for _, record in said]
        if (path / EVALS_NAME).is_file():
            numbers, picture = path / "fit.json", path / "fit.png"
            with naming(numbers):
                found = _one_or_all([record for _, record in said])
                replace_file(numbers, to_json(found).encode())
            title = next(iter(own)) if len(own) == 1 else ""
            _save(plots.draw_fits([*own.values()], [*own], title=title), picture)
            written += [send_back(numbers), send_back(picture)]
    if flags.out is not None:
        written.append(
            _save(plots.draw_fits(list(fits.values()), list(fits)), flags.out)
        )
    record = _one_or_all(records)
    if flags.pool:
        pooled = {
            recipe: scaling.pool_seeds([fits[name] for name in names])
            for recipe, names in seeds_of(
                {name: result.curve for name, result in fits.items()}
            ).items()
        }
        texts += [text.pooled_text(each, recipe) for recipe, each in pooled.items()]
        record = {"seeds": records, "pooled": _pooled_record(pooled)}
    if flags.json:
        for result in fits.values():
            to_stderr(text.warned(result.warnings))
    return Answer("\n".join(texts), record, written)


def _pooled_record(pooled: Mapping[str, Record]) -> Any:
    """Return what was pooled as JSON: one recipe as an object, several by name."""
    return pooled[""] if list(pooled) == [""] else dict(pooled)


def _with_extras(result: Fit, flags: Flags) -> tuple[str, dict[str, Any]]:
    """Return text and record of a fit, with the tables that the flags request."""
    curve = result.whole_curve
    said, record = text.fit_text(result, curve.name), _named(curve.name, result)
    if flags.sensitivity:
        rows = scaling.sensitivity(result)
        said += text.table(*text.sensitivity_sheet(result, rows))
        record["sensitivity"] = rows
    if flags.bootstrap:
        found = scaling.bootstrap(result, num_resamples=flags.bootstrap)
        said += text.bootstrap_text(found)
        record["bootstrap"] = found
        found = _over_prompts(result, num_resamples=flags.bootstrap)
        if found is not None:
            said += text.bootstrap_text(found)
            record["prompt_bootstrap"] = found
    return said, record


def _over_prompts(result: Fit, *, num_resamples: int) -> scaling.Bootstrap | None:
    """Bootstrap a sigmoid over its prompts, and samples if their number is known.

    None if there are no pass rates per prompt, or they cannot be resampled.
    """
    rates, curve, settings = fitted_rates(result), result.whole_curve, result.settings
    if rates is None or result.law != "sigmoid":
        return None
    if settings.weighs:
        note = "no bootstrap over prompts: its refits are not weighted"
        to_stderr(text.warned([f"{curve.name}: {note}"]))
        return None
    if R0 in result.problem.held:  # such as the rate at zero compute, in the paper's
        reward = result.initial_reward
        settings = dataclasses.replace(settings, initial_reward=reward)
    zero = [0.0] if result.problem.observes_zero else []
    return scaling.bootstrap_prompts(
        np.append(zero, result.curve.x),
        rates,
        num_samples=curve.samples_per_prompt,
        settings=settings,
        num_resamples=num_resamples,
    )


@command(
    "which recipe scales better",
    Flag(
        "--vs",
        PATHS | {"action": "append"},
        "runs of the second recipe: those before it are of the first",
    ),
    Flag(
        "--paired",
        SWITCH,
        "compare runs of one seed with each other; in their order if no seed is known",
    ),
    Flag(
        "--run-sd",
        WIDTH,
        f"spread of A between runs of one recipe, for recipes with one run ({RUN_SD}, "
        "of ScaleRL's own runs)",
    ),
    Flag(
        "--margin",
        WIDTH,
        "largest difference of A between equal recipes (%(default)s, the paper's)",
        default=0.02,
    ),
    Flag("--out", PATH, "a .png or .svg of every curve, and of the linearised ones"),
)
def compare(flags: Flags) -> Answer:
    """Compare recipes two by two; more than two also as one table of their runs.

    Runs that differ only in their seed are of one recipe.  Run directories are grouped
    by their settings, the runs of a table by --group if it has a column of seeds, other
    runs by --vs.  The verdict comes from a test: the spread between runs is estimated
    from the seeds, so one run each names no winner.  The paper's rule (|A1 - A2| within
    the margin: refit both with the mean A and compare B; else A decides) is shown after
    it.
    """
    _check_out(flags.out)
    behind, *more = flags.vs or [()]
    if more:
        raise ValueError(
            f"--vs is given {1 + len(more)} times, and parts two recipes: compare more "
            f"by twos, or as the runs of one table with --group"
        )
    flags.paths = [*flags.paths, *behind]
    fitted = fit_each(flags)
    fits = {fit.curve.name: fit for _, fit in fitted}
    others = set(_each_run(behind))
    second = {fit.curve.name for path, fit in fitted if path in others}
    if behind and len(second) in (0, len(fits)):
        side = "before" if second else "behind"
        raise CurveError(
            f"no run {side} --vs can be used, and the others are of one recipe: "
            f"{', '.join(fits)}; mend or replace what is left out"
        )
    recipes = group_runs(fits, second=second)
    if len(recipes) < 2:
        raise CurveError(
            f"compare needs two recipes or more, and found runs of one: "
            f"{', '.join(fits)}; give paths of another, behind --vs if their files do "
            f"not tell, or --group for the runs of one file"
        )
    found = compare_recipes(
        fits, recipes, margin=flags.margin, run_sd=flags.run_sd, paired=flags.paired
    )
    written = []
    if flags.out is not None:
        figure = plots.draw_fits(list(fits.values()), list(fits))
        written.append(_save(figure, flags.out))
        if found.runs.shared_asymptote is not None:
            lines = flags.out.with_stem(f"{flags.out.stem}-lines")
            figure = plots.draw_linearised(found.runs, names=list(fits))
            written.append(_save(figure, lines))
    texts = [*map(text.comparison_text, found.pairs), text.runs_text(found.runs)]
    record = {"pairs": found.pairs, "runs": found.runs}
    return Answer("\n".join(texts), record, written)


@command(
    "fit the first part, predict the rest",
    Flag("--fractions", SHARES, "of the last compute that are fitted (0.25 0.33 0.5)"),
    Flag(
        "--model-size",
        COLUMN,
        "parameters of each run's model: instead, test Tan et al.'s law over all "
        "runs, within every size and on the largest one",
    ),
    Flag(
        "--num-first",
        K,
        "with --model-size: evaluations of each run that are fitted (%(default)s)",
        default=25,
    ),
    Flag(
        "--pool",
        SWITCH,
        "the curves are seeds of one recipe, or of each that their files name: also "
        "the mean errors over the seeds",
    ),
    Flag("--out", PATH, "a .png or .svg"),
)
def extrapolate(flags: Flags) -> Answer:
    """Fit the first part of the compute by every law, and predict the rest.

    25, 33 and 50 % of the compute; the laws are ranked by that held-out error.
    """
    _check_out(flags.out)
    if flags.model_size is not None:
        return _extrapolate_sizes(flags)
    found = {name: test for _, name, test in of_each(flags, _extrapolate_one)}
    written = []
    if flags.out is not None:
        for number, (name, test) in enumerate(found.items(), 1):
            stem = flags.out.stem + (f"-{number}" if number > 1 else "")
            figure = plots.draw_extrapolation(test, title=name)
            written.append(_save(figure, flags.out.with_stem(stem)))
    texts = [text.extrapolation_text(test, name) for name, test in found.items()]
    record = _one_or_all([_named(name, test) for name, test in found.items()])
    if flags.pool:
        level = _from_flags(Settings, flags).level
        pooled = {
            recipe: scaling.pool_extrapolations(
                [found[name] for name in names], level=level
            )
            for recipe, names in seeds_of(
                {name: test.curve for name, test in found.items()}
            ).items()
        }
        texts += [
            text.pooled_extrapolation_text(each, recipe)
            for recipe, each in pooled.items()
        ]
        record = {"seeds": record, "pooled": _pooled_record(pooled)}
    return Answer("\n".join(texts), record, written)


def _extrapolate_one(curve: Curve, flags: Flags) -> scaling.Extrapolation:
    return scaling.extrapolate_curve(
        curve,
        fractions=flags.fractions or FRACTIONS,
        settings=_from_flags(Settings, flags),
    )


@command(
    "compute and cost to a target, gain of doubling, when to stop",
    Flag("--target", RATES, "pass rate to reach; may be given again"),
    Flag("--price", POSITIVE, "cost of one unit of x"),
    Flag(
        "--point-value",
        POSITIVE,
        "what one more point (0.01) of pass rate is worth, in the money of "
        "--price; sets where to stop",
    ),
    Flag(
        "--stop-below",
        POSITIVE,
        "least pass rate per unit of x worth having, instead of these two",
    ),
    Heading(
        "sweep (IsoCompute)",
        "with --budget the runs are a sweep over rollouts per prompt, and x is the "
        "column step, which is converted to rollouts, or a column of rollouts",
    ),
    Flag(
        "--budget",
        POSITIVES,
        "rollouts to spend: gives n, B_p and M; may be given again",
    ),
    Flag("--rollouts-per-prompt", COLUMN, "n of each run"),
    Flag("--prompts-per-step", COLUMN, "B_p of each run"),
    Flag(
        "--bin-width",
        WIDTH,
        "width of the reward bins, above an evaluation's noise (%(default)s)",
        default=0.02,
    ),
    Heading(
        "pre-training (Chinchilla)",
        "with --flops every row is a trained model: --model-size, --x tokens, --y loss",
    ),
    Flag(
        "--flops",
        POSITIVES,
        "FLOPs to spend: gives the model size and tokens; may be given again",
    ),
    Flag("--model-size", COLUMN, "parameters of each model"),
    Heading(
        "power",
        "with --power the runs measure the spread between runs of one recipe",
    ),
    Flag(
        "--power",
        GAIN,
        "a difference in A: gives the runs of each recipe that would decide it",
    ),
    Flag("--run-sd", WIDTH, "spread of A between runs, instead of the measured one"),
    Flag("--paired", SWITCH, "runs of one seed will be compared with each other"),
    Flag(
        "--recipes",
        K,
        "the first recipe and those compared with it (those given, 2 at least)",
    ),
)
def plan(flags: Flags) -> Answer:
    """Plan from the fit of a curve, or how to spend a budget.

    The compute and cost to reach a pass rate, what twice the compute would gain, and
    where a further unit of compute gains less than it costs; each with an interval.
    """
    if flags.flops:
        return _plan_flops(flags)
    if flags.budget:
        return _plan_rollouts(flags)
    if flags.power:
        return _plan_power(flags)
    found = {name: plan for _, name, plan in of_each(flags, _plan_one)}
    texts = [text.plan_text(plan, name) for name, plan in found.items()]
    records = [_named(name, plan) for name, plan in found.items()]
    return Answer("\n".join(texts), _one_or_all(records))


def _plan_one(curve: Curve, flags: Flags) -> scaling.Plan:
    return scaling.plan(
        fit_one(curve, flags),
        target=flags.target,
        price_per_chip_hour=flags.price,
        value_of_a_point=flags.point_value,
        stop_below=flags.stop_below,
    )


@command(
    "fit again as a run evaluates; alarm when it leaves its forecast",
    Flag("--once", SWITCH, "look once and end"),
    Flag("--every", S, "seconds between two looks (%(default)s)", default=10),
    Flag(
        "--until",
        POSITIVE,
        "compute to forecast (default: the end of the run if config.json gives it, "
        "else twice the present)",
    ),
    Flag(
        "--patience",
        K,
        "evaluations in a row outside the band that make an alarm (%(default)s)",
        default=DEFAULT_PATIENCE,
    ),
    LEVEL,
    Flag(
        "--alarm-level",
        SHARE,
        "level of the band that evaluations are compared with (%(default)s)",
        default=DEFAULT_ALARM_LEVEL,
    ),
    Flag(
        "--logdir",
        PATH,
        "for TensorBoard (default for a run directory: tensorboard/scaling in it)",
    ),
    Flag("--no-tensorboard", SWITCH, "show it in the terminal only"),
    Flag("--port", PORT, "follow runs and studies on a page at http://localhost:PORT"),
    path=ALL_PATHS,
    shared=INPUT,
)
def watch(flags: Flags) -> int:
    """Follow a run: fit, forecast, and compare each evaluation with its forecast.

    The forecast is made from the first half of the run.  Ends with the run, also one
    that ended early, with status 3 if there was an alarm; with --port at Ctrl-C.
    """
    flags.selection = _from_flags(scaling.Selection, flags)
    try:
        if flags.port is not None:
            return _watch_on_page(flags)
        if len(flags.paths) > 1:
            raise CurveError(
                f"{len(flags.paths)} runs: a terminal follows one; --port=8080 shows "
                f"several on a page"
            )
        (flags.path,) = flags.paths
        if flags.no_tensorboard:
            flags.logdir = None
        elif flags.logdir is None and flags.path.is_dir():
            flags.logdir = flags.path / BOARD_DIRECTORY
        return follow(_from_flags(Watch, flags), every_s=flags.every, once=flags.once)
    except KeyboardInterrupt:  # nothing is half-made, which `answer` would say
        return INTERRUPTED


def _watch_on_page(flags: Flags) -> int:
    """Follow runs on a page until Ctrl-C; nothing is written into them."""
    if flags.once or flags.logdir:
        unread = "--once" if flags.once else "--logdir"
        raise CurveError(f"--port does not read {unread}: leave it out")
    for path in find_runs(flags.paths).values():
        if not URL.match(str(path)) and not path.exists():
            to_stderr(f"waiting for {path}: there is no such file yet\n")

    def find() -> dict[str, Watch]:
        found = {}
        for name, path in find_runs(flags.paths).items():
            own = argparse.Namespace(**(vars(flags) | {"path": path}))
            found[name] = _from_flags(Watch, own)
        return found

    return follow_on_page(find, port=flags.port, every_s=flags.every)


@command(
    "one HTML page of everything, which opens offline",
    Flag("--out", PATH, "the page (%(default)s)", default=Path("scaling-report.html")),
    Flag("--title", NAME, "title of the page", default="Scaling report"),
)
def report(flags: Flags) -> Answer:
    """Write one self-contained HTML page.

    The verdict on each pair of recipes, figures, tables, method, warnings and data of
    all curves; of run directories also settings, versions, training and rollouts.
    """
    _check_out(flags.out, (".html",))
    fitted = fit_each(flags)
    fits = {fit.curve.name: fit for _, fit in fitted}
    paths = {fit.curve.name: path for path, fit in fitted}
    page = make_report(fits, title=flags.title, paths=paths, left_out=flags.left_out)
    with naming(flags.out):
        replace_file(flags.out, page.encode())
    verdicts = {
        name: f"A {text.parameter_text(fit, fit.parameters['A'])}"
        if "A" in fit.parameters
        else f"R^2 {fit.r_squared:.4f}"
        for name, fit in fits.items()
    }
    said = "".join(f"{name}: {verdict}\n" for name, verdict in verdicts.items())
    records = [_named(name, result) for name, result in fits.items()]
    return Answer(said, _one_or_all(records), [flags.out])


# ---- laws over several runs: a setting of every run is a column of its file


def _refuse_unread(flags: Flags, fields: Sequence[str], law: str) -> None:
    """Raise CurveError if flags of these fields are set: the law does not read them."""
    plain = vars(make_parser().parse_args([flags.command, "."]))
    names = {field: flag for flag, field in FIELDS.items()}
    unread = [
        names.get(field, f"--{field.replace('_', '-')}")
        for field in fields
        if field in plain and getattr(flags, field) != plain[field]
    ]
    if unread:
        rows = "; --where COLUMN=VALUE chooses rows" if "--group" in unread else ""
        raise CurveError(
            f"a law {law} does not read {', '.join(unread)}: leave it out{rows}"
        )


def _size_points(flags: Flags) -> tuple[list[Array], str]:
    """Return model size, x and error of all points of all runs, and the name of x."""
    _refuse_unread(flags, ONE_RUN_FLAGS, "over model sizes")
    curves = [curve for _, curve in read(flags, model_size=flags.model_size)]
    parts = [
        (np.full(curve.x.size, curve.constants[flags.model_size]), curve.x, 1 - curve.y)
        for curve in curves
    ]
    points = [np.concatenate(part) for part in zip(*parts, strict=True)]
    return points, curves[0].x_name


def _fit_sizes(flags: Flags) -> Answer:
    """Fit a law of Tan et al. over runs of several model sizes."""
    if flags.law not in (None, *SIZE_LAWS):
        raise CurveError(
            f"--law {flags.law} is of one run; with --model-size choose one of "
            f"{', '.join((*SIZE_LAWS, *LOSS_LAWS))}"
        )
    points, x_name = _size_points(flags)
    if flags.law == "tan_plateau":
        found = scaling.fit_plateau(*points, level=flags.level)
    else:
        found = scaling.fit_tan(*points, x_name=x_name, level=flags.level)
    what = f"over {x_name}, {np.unique(points[0]).size} model sizes"
    return Answer(text.surface_text(found, what), found)


def _extrapolate_sizes(flags: Flags) -> Answer:
    """Test Tan et al.'s law: runs' own later points, and the largest model."""
    points, x_name = _size_points(flags)
    first = flags.num_first
    tests = [scaling.extrapolate_intra(*points, num_first=first, x_name=x_name)]
    if np.unique(points[0]).size > 2:
        tests += [
            scaling.extrapolate_inter(*points, num_intercept=count, x_name=x_name)
            for count in (None, first)
        ]
    return Answer(text.size_tests_text(tests, x_name), {"tests": tests})


def _fit_loss(flags: Flags, law: str) -> Answer:
    """Fit a law of pre-training loss to the rows of a table; its record is the fit.

    Rows at x = 0, such as a first evaluation, are left out: a power law has no value
    there.
    """
    _refuse_unread(
        flags, (*CURVE_FLAGS, *ONE_RUN_FLAGS), "of loss, fitted to all rows,"
    )
    named = {"--x": flags.x, "--y": flags.y}
    if law != "kaplan_one":
        named = {"--model-size": flags.model_size, **named}
    missing = [flag for flag, name in named.items() if name is None and flag != "--x"]
    if missing:
        raise CurveError(
            f"a law of loss needs its columns: name them with {', '.join(missing)} "
            "(--x: tokens, or for kaplan_one any quantity; --y: loss)"
        )
    selection = _from_flags(scaling.Selection, flags)
    parts = [load_columns(path, named, selection) for path in flags.paths]
    columns = [
        np.concatenate(each) for each in zip(*(p.values for p in parts), strict=True)
    ]
    *_, x_name, y_name = parts[0].names
    positive = columns[-2] != 0
    notes = tuple(note for part in parts for note in part.notes)
    if not positive.all():
        count = int((~positive).sum())
        notes += (f"{count} rows at {x_name} = 0 left out: a power law has none there",)
    columns = [column[positive] for column in columns]
    columns[-2] = flags.x_scale * columns[-2]
    found = LOSS_LAWS[law](*columns, level=flags.level).noted(notes)
    what = f"loss {y_name} over {flags.x_name or x_name}"
    return Answer(text.surface_text(found, what), found)


def _plan_flops(flags: Flags) -> Answer:
    """Find the best model size and number of tokens for budgets of FLOPs."""
    fitted = _fit_loss(flags, "chinchilla")
    found: scaling.SurfaceFit = fitted.record
    allocations = []
    for flops in flags.flops:
        size, tokens = map(float, scaling.compute_optimal(found, flops))
        loss = float(found.predict(size, tokens))
        beyond = size > found.largest[0] or tokens > found.largest[1]
        allocations.append(
            {"flops": flops, "model_size": size, "tokens": tokens, "loss": loss}
            | {"beyond_data": beyond}
        )
    said = fitted.said + text.compute_optimal_text(allocations)
    return Answer(said, found.to_record() | {"allocations": allocations})


def _plan_power(flags: Flags) -> Answer:
    """Find the runs that would decide a difference between recipes."""
    if flags.recipes is not None and flags.recipes < FEWEST_RECIPES:
        raise CurveError(f"--recipes {flags.recipes}: two are compared at least")
    recipes = group_runs({fit.curve.name: fit for _, fit in fit_each(flags)})
    found = plan_power(
        recipes,
        flags.power,
        run_sd=flags.run_sd,
        paired=flags.paired,
        num_recipes=flags.recipes,
    )
    return Answer(text.power_text(found), found)


def _plan_rollouts(flags: Flags) -> Answer:
    """Find how to spend a budget of rollouts, by a sweep of runs (IsoCompute)."""
    names = ("rollouts_per_prompt", "prompts_per_step")
    columns = {name: getattr(flags, name) for name in names}
    flags.by_step, runs = True, []
    for _, curve in read(flags, **columns):
        if curve.x_column.endswith(OWN_AXES) and flags.x_scale == 1:
            raise CurveError(
                f"{curve.name}: x = {curve.x_column} does not count rollouts, which "
                f"--budget is in: give --x step"
            )
        n, prompts = (round(curve.constants[column]) for column in columns.values())
        # A step is B_p prompts with n rollouts each.
        scale = n * prompts if is_step(curve.x_column) else 1
        runs.append(
            scaling.SweepRun(
                rollouts_per_prompt=n,
                prompts_per_step=prompts,
                compute=scale * curve.x,
                reward=curve.y,
            )
        )
    found = scaling.fit_isocompute(runs, bin_width=flags.bin_width)
    allocations = [found.allocate(budget) for budget in flags.budget]
    record = found.to_record() | {"allocations": allocations}
    return Answer(text.isocompute_text(found, allocations), record)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    flags = make_parser().parse_args(arguments)
    return answer(lambda: _run(flags))


def _run(flags: Flags) -> int:
    """Print a command's answer; `watch` prints on its own and has a status."""
    run, *_ = COMMANDS[flags.command]
    found = run(flags)
    if isinstance(found, int):
        return found
    if flags.json:
        to_stdout(to_json(found.record))
        return 0
    to_stdout(found.said)
    if found.written:
        to_stdout(f"wrote {', '.join(map(str, found.written))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
