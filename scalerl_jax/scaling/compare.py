"""Comparison of runs: two recipes, many recipes, seeds of one recipe.

Two recipes are compared by a test that uses the spread between runs of one recipe,
estimated from several seeds.  With one run each there is no winner.  The paper's rule
is reported beside the test; it ignores noise and always names a winner.

One file above 400 lines: the three comparisons share their fits.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from scalerl_jax.scaling.differences import (
    RUN_SD,
    Difference,
    RecipeSample,
    difference,
    evaluation_noise,
    pooled,
)
from scalerl_jax.scaling.estimate import estimate
from scalerl_jax.scaling.fit import fit_alone
from scalerl_jax.scaling.identifiability import ASYMPTOTE_MARGIN
from scalerl_jax.scaling.obstacles import (
    Names,
    Runs,
    copies,
    measured_alike,
    refuse_copies,
    too_few,
    unlike_ranks,
)
from scalerl_jax.scaling.pairing import PairedBy, pair, partners
from scalerl_jax.scaling.records import (
    OPEN,
    Array,
    CurveError,
    Interval,
    Record,
)
from scalerl_jax.scaling.result import Fit
from scalerl_jax.scaling.search import A
from scalerl_jax.scaling.uncertainty import reach_of_mean, student_quantile

FEWEST_RECIPES = 2  # in a comparison
FIELDS_OF_FIT = (  # repeated by a row of a table
    *("asymptote", "asymptote_interval", "exponent", "exponent_interval"),
    *("midpoint", "midpoint_interval", "identified", "reason"),
)
T = TypeVar("T")
Pair = tuple[float, float]  # of the first recipe and of the second


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperRule(Record):
    """The paper's rule, which ignores noise.

    If |A_a - A_b| is within the margin, both are fitted again with the mean A, and the
    higher B wins; else the higher A (https://arxiv.org/abs/2510.13786, appendix A.7).
    It names a winner between equal recipes too, if both A are identified.
    """

    winner: str | None  # None: an A is not identified, or the runs are not comparable
    says: str  # the reason, with the numbers
    margin: float  # |dA| up to which it calls two asymptotes equal
    equal_asymptotes: bool  # by the margin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """Two recipes, a and b; differences are a minus b.

    `winner` is None where the test finds none; `reason` says why.  The error rate
    1 - `level` is split between the two differences that may decide, A and B, and
    between the pairs of recipes if there are several.
    """

    names: tuple[str, str]
    winner: str | None
    reason: str
    comparable: bool  # False: one does not climb, or they are not measured alike
    level: float  # of the verdict: least share of equal recipes without a winner
    num_runs: tuple[int, int]
    paired: bool  # runs of one seed are compared with each other
    paired_by: PairedBy | None  # "order": no seed is known; None: not paired
    run_sd: float  # between runs of one recipe: of A, or of the rate if A is unknown
    run_sd_source: str  # in words

    identified: tuple[bool, bool]  # whether every run identifies A
    asymptotes: Pair  # means over the runs, as are all pairs of values here
    exponents: Pair
    midpoints: Pair
    asymptote_difference: Difference | None  # None: A is not identified
    # With A held at the mean of both; None if A is not identified, or if the two A
    # surely differ by more than the margin.
    shared_asymptote: float | None
    exponents_at_shared: Pair | None
    midpoints_at_shared: Pair | None
    # Of log B at the shared A; None for one run each, which do not show the spread of B
    # between runs of one recipe.
    log_exponent_difference: Difference | None
    rate_difference: Difference  # at `compared_at`; decides if A is not identified
    compared_at: float  # the last compute that all runs reached

    paper_rule: PaperRule
    warnings: tuple[str, ...]


def compare(
    a: Fit | Sequence[Fit],
    b: Fit | Sequence[Fit],
    *,
    names: tuple[str, str] = ("a", "b"),
    margin: float = ASYMPTOTE_MARGIN,
    run_sd: float | None = None,
    paired: bool = False,
    num_pairs: int = 1,
    others: Sequence["Recipe"] = (),
) -> Comparison:
    """Compare two recipes by their runs, fitted with the sigmoid over the same x.

    A is tested first; if that does not decide and the means are within the margin, B
    with A held at the mean of both; if a run does not identify A, the rates at the last
    compute that all reached.  A winner needs two runs or more of each, all climbing.

    Args:
        a: the run of the first recipe, or its runs, which differ in their seeds.
        margin: largest difference between the asymptotes of equal recipes.
        run_sd: of A between runs of one recipe, for one run each; by default ScaleRL's.
        paired: compare runs of one seed (`pair`); leave runs without a partner out.
        num_pairs: number of pairs of recipes that are compared and share the error.
        others: further recipes over the same x, which also estimate the spread.
    """
    runs, by, notes = _checked(a, b, names, paired=paired)
    runs, told, unlike = measured_alike(runs, names)
    end = min(fit.x_last for fit in (*runs[0], *runs[1]))
    error = (1.0 - runs[0][0].level) / num_pairs
    test = _test(runs, run_sd, others, paired=paired)
    by_a, by_b, held = _by_law(runs, 1.0 - 0.5 * error, margin, test)
    by_rate = _at(end, runs, 1.0 - error, test)
    deciding = by_a or by_rate
    obstacle = unlike or too_few(runs, names)
    sign, reason = choose(by_a, by_b, by_rate, margin=margin, obstacle=obstacle)
    return Comparison(
        names=names,
        winner=names[int(sign < 0)] if sign else None,
        reason=reason,
        comparable=unlike is None,
        level=runs[0][0].level,
        num_runs=_both(runs, len),
        paired=paired,
        paired_by=by,
        run_sd=deciding.run_sd,
        run_sd_source=_source(deciding, run_sd, paired=paired),
        identified=_both(runs, _identify),
        asymptotes=_both(runs, _asymptote_of),
        exponents=_both(runs, _exponent_of),
        midpoints=_both(runs, _midpoint_of),
        asymptote_difference=by_a,
        shared_asymptote=held and held[0][0].asymptote,
        exponents_at_shared=held and _both(held, _exponent_of),
        midpoints_at_shared=held and _both(held, _midpoint_of),
        log_exponent_difference=by_b,
        rate_difference=by_rate,
        compared_at=end,
        paper_rule=_paper_rule(runs, held, names, margin, unlike),
        warnings=(*notes, *told, *_unused(run_sd, deciding)),
    )


def _test(
    runs: Runs, run_sd: float | None, others: Sequence["Recipe"], *, paired: bool
) -> "_Test":
    """Return the settings of a pair's test, with the other recipes that it can use.

    If `paired`, recipes that lack a seed are left out.
    """
    if paired:
        others = [
            each if fits is each.fits else Recipe(fits)
            for each in others
            if (fits := partners(each.fits, runs[0])) is not None
        ]
    spread = RUN_SD if run_sd is None else run_sd
    return _Test(run_sd=spread, paired=paired, others=others)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The runs of one recipe, from which the spread between runs is estimated."""

    fits: tuple[Fit, ...]

    @functools.cached_property
    def _has_copies(self) -> bool:
        return copies(fit.whole_curve for fit in self.fits) is not None

    @property
    def asymptotes(self) -> Array | None:
        """A of each run [S]; None where a run does not identify it, or is a copy."""
        known = _identify(self.fits) and all(fit.climbs for fit in self.fits)
        if not known or self._has_copies:
            return None
        return np.array([fit.asymptote for fit in self.fits])

    @functools.cached_property
    def log_exponents(self) -> Array | None:
        """Log B of each run [S], with A held at their mean; None as in `asymptotes`."""
        values = self.asymptotes
        if values is None:
            return None
        held = [hold_asymptote(fit, float(values.mean())) for fit in self.fits]
        return np.log([fit.exponent for fit in held])

    def rates_at(self, x: float) -> Array | None:
        """Fitted pass rate of each run [S] at x; None where one ended or is a copy."""
        if min(fit.x_last for fit in self.fits) < x or self._has_copies:
            return None
        return np.array([float(fit.predict(x)) for fit in self.fits])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Test:
    """Settings of the test of a difference, of any quantity."""

    run_sd: float = RUN_SD
    paired: bool = False
    others: Sequence[Recipe] = ()


def _at(end: float, runs: Runs, level: float, test: _Test) -> Difference:
    """Return the difference of the curves' rates at the compute `end`."""
    rates = [each.rates_at(end) for each in test.others]
    return _differ(runs, _rate_at(end), level, test, rates)


def _by_law(
    runs: Runs, level: float, margin: float, test: _Test
) -> tuple[Difference | None, Difference | None, Runs | None]:
    """Return the differences of A and of log B, and the runs with a shared A held.

    All are None if A is not identified; the last two if the two A surely differ by more
    than the margin; the difference of log B also for one run each.
    """
    if not all(_both(runs, _identify)):
        return None, None, None
    spread = [each.asymptotes for each in test.others]
    by_a = _differ(runs, _asymptote, level, test, spread)
    if by_a.sign and abs(by_a.value) > margin:
        return by_a, None, None
    held = _hold_mean(runs, _both(runs, _asymptote_of))
    if max(map(len, runs)) == 1:
        return by_a, None, held
    spread = [each.log_exponents for each in test.others]
    return by_a, _differ(held, _log_exponent, level, test, spread), held


def choose(
    by_a: Difference | None,
    by_b: Difference | None,
    by_rate: Difference,
    *,
    margin: float,
    obstacle: str | None = None,
) -> tuple[int, str]:
    """Return which recipe is better (1: first, -1: second, 0: neither), and why.

    B decides if A does not and is equal within the margin; the rates decide if A is not
    identified; nothing does if there is an obstacle, such as too few runs.
    """
    if obstacle:
        return 0, obstacle
    if by_a is None:
        what, found = "the pass rate at the last compute of all runs", by_rate
    elif by_a.sign or by_b is None or abs(by_a.value) > margin:
        what, found = "A", by_a
    else:
        what, found = "B at the shared A", by_b
    if found.sign:
        return found.sign, f"{what} is higher"
    if found is by_b:
        return (
            0,
            "not decided: the intervals of the differences in A, and in B, contain 0",
        )
    return 0, f"not decided: the interval of the difference in {what} contains 0"


def hold_asymptote(fit: Fit, asymptote: float) -> Fit:
    """Fit a curve again with A held (the paper's fixed-A refit)."""
    held = {**fit.problem.held, A: asymptote}
    return estimate(fit.curve, fit.settings, held, fit.parameters["R0"].source)


def _hold_mean(runs: Runs, asymptotes: Pair) -> Runs:
    """Return all runs fitted with the mean of the two recipes' A."""
    shared = float(np.mean(asymptotes))
    first, second = (
        tuple(hold_asymptote(fit, shared) for fit in fits) for fits in runs
    )
    return first, second


def _both(runs: Runs, of: Callable[[tuple[Fit, ...]], T]) -> tuple[T, T]:
    return of(runs[0]), of(runs[1])


def _identify(fits: Sequence[Fit]) -> bool:
    return all(fit.identified for fit in fits)


def _asymptote_of(fits: Sequence[Fit]) -> float:
    return float(np.mean([fit.asymptote for fit in fits]))


def _exponent_of(fits: Sequence[Fit]) -> float:
    return float(np.exp(np.mean([np.log(fit.exponent) for fit in fits])))


def _midpoint_of(fits: Sequence[Fit]) -> float:
    return float(np.exp(np.mean([np.log(fit.midpoint) for fit in fits])))


def _checked(
    a: Fit | Sequence[Fit], b: Fit | Sequence[Fit], names: Names, *, paired: bool
) -> tuple[Runs, PairedBy | None, tuple[str, ...]]:
    """Return the runs of both recipes, what pairs them, and warnings on the pairs.

    Raises CurveError if they cannot be compared.
    """
    first, second = (
        (each,) if isinstance(each, Fit) else tuple(each) for each in (a, b)
    )
    if not (first and second):
        raise CurveError("a recipe without a run cannot be compared; give one at least")
    for fits in itertools.product(first, second):
        require_sigmoids(dict(zip(names, fits, strict=True)))
    if not paired:
        return (first, second), None, ()
    found = pair(list(zip(names, (first, second), strict=True)))
    return (found.runs[0], found.runs[1]), found.by, found.warnings


def require_sigmoids(fits: Mapping[str, Fit]) -> None:
    """Refuse fits of another law than the sigmoid, and over different x."""
    for name, fit in fits.items():
        if fit.law != "sigmoid":
            raise CurveError(
                f"{name} was fitted with --law {fit.law}; A, B and C_mid are compared "
                "between fits of the sigmoid"
            )
    units = {fit.x_name for fit in fits.values()}
    if len(units) > 1:
        raise CurveError(
            f"the runs are over different x: {sorted(units)}; give one --x to all"
        )


def _unused(run_sd: float | None, used: Difference) -> tuple[str, ...]:
    """Return a warning if a spread between runs was given, and is measured."""
    if not (run_sd and used.degrees):
        return ()
    return ("--run-sd is not used: the runs of a recipe say how far they are apart",)


def _source(used: Difference, run_sd: float | None, *, paired: bool) -> str:
    """Name the source of the spread between runs."""
    if used.degrees is None:
        return "that of ScaleRL's own runs" if run_sd is None else "given"
    of = "pairs of runs" if paired else "runs"
    if used.num_recipes > FEWEST_RECIPES:
        of = f"{of} of {used.num_recipes} recipes"
    ending = "" if used.degrees == 1 else "s"
    return f"estimated from the {of}, {used.degrees} degree{ending} of freedom"


def _paper_rule(
    runs: Runs, held: Runs | None, names: Names, margin: float, unlike: str | None
) -> PaperRule:
    """Return the paper's rule on the means of two recipes."""
    asymptotes = _both(runs, _asymptote_of)
    gap = abs(asymptotes[0] - asymptotes[1])
    equal = gap <= margin
    known = zip(names, _both(runs, _identify), strict=True)
    unsure = [name for name, identified in known if not identified]
    if unsure or unlike:
        says = f"not decided: A of {' and '.join(unsure)} is not identified"
        says = unlike or says
        return PaperRule(winner=None, says=says, margin=margin, equal_asymptotes=equal)
    pair = asymptotes
    says = f"|dA| = {gap:.3f} is more than {margin:g}: the higher A"
    if equal and held is not None:
        pair = _both(held, _exponent_of)
        says = (
            f"|dA| = {gap:.3f} is within {margin:g}; with A held at "
            f"{np.mean(asymptotes):.4f}, B is {pair[0]:.3f} for {names[0]} and "
            f"{pair[1]:.3f} for {names[1]}: the higher B"
        )
    return PaperRule(
        winner=names[int(pair[0] <= pair[1])],
        says=says,
        margin=margin,
        equal_asymptotes=equal,
    )


# ---- one number of each run, with its interval


def _asymptote(fit: Fit) -> tuple[float, Interval]:
    return fit.asymptote, fit.asymptote_interval


def _log_exponent(fit: Fit) -> tuple[float, Interval]:
    ends = fit.exponent_interval.low, fit.exponent_interval.high
    logs = [float(np.log(end)) if end else None for end in ends]
    return float(np.log(fit.exponent)), Interval(*logs)


def _rate_at(x: float) -> Callable[[Fit], tuple[float, Interval]]:
    def rate(fit: Fit) -> tuple[float, Interval]:
        low, high = fit.band(x)
        return float(fit.predict(x)), Interval(float(low), float(high))

    return rate


def _differ(
    runs: Runs,
    number: Callable[[Fit], tuple[float, Interval]],
    level: float,
    test: _Test,
    others: Sequence[Array | None] = (),
) -> Difference:
    """Return the difference of one number between the runs of two recipes.

    Args:
        others: the same number of the runs of other recipes; None where it is unknown.
    """
    return difference(
        *(_sample(fits, number, level) for fits in runs),
        level=level,
        run_sd=test.run_sd,
        paired=test.paired,
        others=[each for each in others if each is not None],
    )


def _sample(
    fits: Sequence[Fit], number: Callable[[Fit], tuple[float, Interval]], level: float
) -> RecipeSample:
    """Return one number of runs, with their own intervals.

    These are stretched to the level by the ratio of Student's t.
    """
    values, reach = np.empty(len(fits)), np.empty((len(fits), 2))
    for place, fit in enumerate(fits):
        value, interval = number(fit)
        stretch = student_quantile(level, fit.degrees)
        stretch /= student_quantile(fit.level, fit.degrees)
        low, high = interval.low, interval.high
        reach[place] = (
            np.inf if low is None else stretch * max(value - low, 0.0),
            np.inf if high is None else stretch * max(high - value, 0.0),
        )
        values[place] = value
    return RecipeSample(values, reach)


def noise_of_one(fits: Sequence[Fit], level: float, *, at: float | None) -> float:
    """Return `Difference.noise` of recipes whose runs are measured as these are.

    Args:
        at: compute of the pass rates; None: of A.
    """
    sample = _sample(fits, _asymptote if at is None else _rate_at(at), level)
    return max(evaluation_noise(sample, sample, runs=(1, 1)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRow(Record):
    """One run in a table of many (leave-one-out).

    Values at the shared A are None for a run that does not climb, and for a run whose
    interval of A does not overlap that of the highest A: no A fits both.
    """

    name: str
    asymptote: float
    asymptote_interval: Interval
    exponent: float
    exponent_interval: Interval
    midpoint: float
    midpoint_interval: Interval
    identified: bool
    reason: str | None
    within_margin: bool  # A at most the margin below the highest identified A
    shared_exponent: float | None  # B and C_mid with A held at the shared value
    shared_midpoint: float | None
    rank: int | None  # 1 is best; None: A is not identified
    tied: bool  # another run has the same rank
    x: Array = dataclasses.field(repr=False)  # [n] compute
    linearised: Array | None = dataclasses.field(repr=False)  # [n] F(R), shared A
    fit: Fit = dataclasses.field(repr=False)
    fit_at_shared: Fit | None = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTable(Record):
    """Many runs by rank; runs of equal rank by B at the shared A."""

    x_name: str
    y_name: str
    margin: float
    run_sd: float  # of A between runs of one recipe, as the ranks assume
    # Mean A of the runs whose intervals overlap that of the highest A; None: no A is
    # identified.
    shared_asymptote: float | None
    rows: tuple[RunRow, ...]  # by rank
    warnings: tuple[str, ...]


def spread_between(recipes: Iterable[Recipe]) -> float | None:
    """Return the spread of A between runs of one recipe, over all; None: unknown."""
    values = [each.asymptotes for each in recipes if len(each.fits) > 1]
    found = [each for each in values if each is not None]
    return float(np.sqrt(pooled(found, paired=False)[0])) if found else None


def compare_many(
    fits: Mapping[str, Fit], *, margin: float = ASYMPTOTE_MARGIN, run_sd: float = RUN_SD
) -> RunTable:
    """Rank many runs by A; runs whose A the data do not tell apart share a rank.

        rank = 1 + number of runs with a higher A

    An A counts as higher if the interval of the difference, which includes a spread of
    `run_sd` between runs of one recipe, is above 0 and the difference exceeds the
    margin.  Runs that share a rank are ordered as the paper's leave-one-out table
    orders equal A: by B with A held at the shared value.  Runs whose A is not
    identified have no rank and come last.

    Args:
        fits: of the sigmoid, by name of run.
        margin: largest difference between the asymptotes of equal recipes.
        run_sd: standard deviation of A between runs of one recipe.
    """
    if not fits:
        raise CurveError("no runs to compare; give at least one fit")
    require_sigmoids(fits)
    sure = {name: fit for name, fit in fits.items() if fit.identified}
    ranks = _ranks(sure, margin, run_sd)
    shared, held = _hold_shared(fits, sure)
    top = max((fit.asymptote for fit in sure.values()), default=1.0)

    def order(name: str) -> tuple[bool, int, float, float]:
        level = min(fits[name].asymptote, top - margin)  # equal within the margin
        exponent = held[name].exponent if name in held else 0.0
        return (name not in sure, ranks.get(name, 0), -level, -exponent)

    places = list(ranks.values())
    rows = tuple(
        RunRow(
            name=name,
            **{field: getattr(fits[name], field) for field in FIELDS_OF_FIT},
            within_margin=name in sure and fits[name].asymptote >= top - margin,
            shared_exponent=held[name].exponent if name in held else None,
            shared_midpoint=held[name].midpoint if name in held else None,
            rank=ranks.get(name),
            tied=name in ranks and places.count(ranks[name]) > 1,
            x=fits[name].curve.x,
            linearised=linearise(held[name]) if name in held else None,
            fit=fits[name],
            fit_at_shared=held.get(name),
        )
        for name in sorted(fits, key=order)
    )
    unsure = [name for name in fits if name not in sure]
    of = "; ".join(unsure) if sure else "any run"
    unranked = (f"no rank, because A is not identified, for {of}",)
    return RunTable(
        x_name=rows[0].fit.x_name,
        y_name=rows[0].fit.y_name,
        margin=margin,
        run_sd=run_sd,
        shared_asymptote=shared,
        rows=rows,
        warnings=(*(unranked if unsure else ()), *unlike_ranks([*sure.values()])),
    )


def _ranks(sure: Mapping[str, Fit], margin: float, run_sd: float) -> dict[str, int]:
    """Return the ranks of runs that identify A; none over chip-hours of a CPU."""
    return {
        name: 1 + _num_higher(fit, sure.values(), margin, run_sd)
        for name, fit in sure.items()
        if not fit.curve.is_wall_time
    }


def _num_higher(fit: Fit, others: Iterable[Fit], margin: float, run_sd: float) -> int:
    """Return the number of other runs whose A is surely higher."""
    return sum(
        other.asymptote > fit.asymptote + margin
        and _differ(
            ((other,), (fit,)), _asymptote, fit.level, _Test(run_sd=run_sd)
        ).sign
        > 0
        for other in others
    )


def _hold_shared(
    fits: Mapping[str, Fit], sure: Mapping[str, Fit]
) -> tuple[float | None, dict[str, Fit]]:
    """Return the shared A, and the runs that may share it, fitted with it held."""
    if not sure:
        return None, {}
    best = max(sure.values(), key=lambda fit: fit.asymptote).asymptote_interval
    near = {
        name: fit
        for name, fit in fits.items()
        if fit.climbs and fit.asymptote_interval.overlaps(best)
    }
    shared = float(np.mean([f.asymptote for n, f in near.items() if n in sure]))
    return shared, {name: hold_asymptote(fit, shared) for name, fit in near.items()}


def linearise(fit: Fit) -> Array:
    """Return a fit's points in ScaleRL's straight-line form.

        F(R) = C_mid^B / ((A - R0) / (R - R0) - 1) = x^B

    so that log F over log x has slope B.  NaN for a noisy point that is not between R0
    and A.  https://arxiv.org/abs/2510.13786, leave-one-out figure.
    """
    rise, height = fit.curve.y - fit.initial_reward, fit.asymptote - fit.initial_reward
    between = (rise > 0) & (fit.curve.y < fit.asymptote)
    form = np.full(rise.shape, np.nan)
    form[between] = fit.midpoint**fit.exponent / (height / rise[between] - 1.0)
    return form


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledParameter(Record):
    """One parameter over seeds; it has no mean if a seed does not fix it."""

    name: str
    values: list[float]  # by seed
    mean: float | None = None
    standard_deviation: float | None = None  # between seeds; None for one seed
    interval: Interval = OPEN  # of the mean, Student's t over the seeds
    largest_deviation: float | None = None  # from the mean; 0.015 for A in the paper
    reason: str | None = None  # why there is no mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pooled(Record):
    """Seeds of one recipe.

    The intervals of `parameters` are of the recipe: they include the spread of seeds.
    `fit` is of all points together; its intervals ignore which seed a point has.
    """

    law: str
    num_seeds: int
    level: float
    parameters: dict[str, PooledParameter]
    identified: bool  # A, by every seed
    fit: Fit
    warnings: tuple[str, ...]


def pool_seeds(fits: Sequence[Fit]) -> Pooled:
    """Pool fits of several seeds of one recipe, all of the same law and x.

        interval = mean +- t(S - 1) * sd / sqrt(S)

    over the S seeds' parameters; B and C_mid are averaged as logarithms.
    """
    if not fits:
        raise CurveError("no seeds to pool; give at least one fit")
    if len({(fit.law, fit.x_name, fit.y_name) for fit in fits}) > 1:
        raise CurveError("seeds to pool must be fits of one law over one x and y")
    refuse_copies(fit.whole_curve for fit in fits)
    names = [
        name
        for name in fits[0].parameters
        if all(fit.parameters[name].interval is not None for fit in fits)
    ]
    level = fits[0].level
    warnings = []
    if len(fits) == 1:
        warnings.append("one seed: what seeds change is not measured")
    unsure = sum(not fit.identified for fit in fits)
    if unsure:
        warnings.append(f"A is not identified for {unsure} of {len(fits)} seeds")
    return Pooled(
        law=fits[0].law,
        num_seeds=len(fits),
        level=level,
        parameters={name: _pooled(name, fits, level) for name in names},
        identified=not unsure,
        fit=fit_together(fits),
        warnings=tuple(warnings),
    )


def _pooled(name: str, fits: Sequence[Fit], level: float) -> PooledParameter:
    """Return mean and spread of one parameter, of its logarithm unless it is a rate."""
    values = np.array([fit.value(name) for fit in fits])
    found = PooledParameter(name=name, values=values.tolist())
    unfixed = sum(not _fixes(fit, name) for fit in fits)
    if unfixed:
        reason = f"not fixed by {unfixed} of {len(fits)} seeds"
        return dataclasses.replace(found, reason=reason)
    is_rate = fits[0].parameters[name].unit == "pass rate"
    logarithmic = not is_rate and np.all(values > 0)
    scale = np.log(values) if logarithmic else values
    back = np.exp if logarithmic else float
    mean = float(scale.mean())
    found = dataclasses.replace(
        found,
        mean=float(back(mean)),
        largest_deviation=float(np.abs(values - back(mean)).max()),
    )
    if len(values) == 1:
        return found
    reach = reach_of_mean(scale, level)
    limits = (0.0, 1.0) if is_rate else (-np.inf, np.inf)
    ends = [float(np.clip(back(mean + side * reach), *limits)) for side in (-1, 1)]
    return dataclasses.replace(
        found, standard_deviation=float(values.std(ddof=1)), interval=Interval(*ends)
    )


def _fixes(fit: Fit, name: str) -> bool:
    """Return whether a seed's own interval of a parameter has both limits."""
    interval = fit.interval(name)
    known = fit.climbs and interval.low is not None and interval.high is not None
    return known and (name != "A" or fit.identified)


def fit_together(fits: Sequence[Fit]) -> Fit:
    """Fit the points of all seeds as one curve.

    R0 is the mean of the given values; otherwise each seed's step 0 observes it once,
    if every seed has one.
    """
    settings = fits[0].settings
    given = [fit.settings.initial_reward for fit in fits]
    known = [value for value in given if isinstance(value, int | float)]
    if known:
        settings = dataclasses.replace(settings, initial_reward=float(np.mean(known)))
    curves, count = [fit.curve for fit in fits], len(fits)
    x = np.concatenate([curve.x for curve in curves])
    order = np.argsort(x, kind="stable")
    errors = [curve.y_se for curve in curves if curve.y_se is not None]
    starts = [curve.r0 for curve in curves if curve.r0 is not None]
    start_errors = [curve.r0_se for curve in curves if curve.r0_se is not None]
    pooled = dataclasses.replace(
        curves[0],
        x=x[order],
        y=np.concatenate([curve.y for curve in curves])[order],
        y_se=np.concatenate(errors)[order] if len(errors) == count else None,
        r0=float(np.mean(starts)) if len(starts) == count else None,
        r0_se=float(np.linalg.norm(start_errors)) / count
        if len(start_errors) == count
        else None,
        r0_evaluations=count,
        num_left_out=sum(curve.num_left_out for curve in curves),
    )
    return fit_alone(pooled, settings)
