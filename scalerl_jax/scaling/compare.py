"""Several runs beside each other: two recipes, many recipes, seeds of one recipe.

Two recipes are compared by the paper's rule, and beside it by a test with intervals.
The rule has no notion of noise; the test has none of seeds: two single runs can differ
by their seeds alone (A by 0.015 in the paper), which `pool_seeds` measures.

One file above 400 lines, as the three share the refits that they compare by.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from scalerl_jax.scaling.bootstrap import (
    check_rates,
    draw_residual_curves,
    refit,
)
from scalerl_jax.scaling.estimate import estimate
from scalerl_jax.scaling.fit import fit_alone
from scalerl_jax.scaling.identifiability import ASYMPTOTE_MARGIN
from scalerl_jax.scaling.records import (
    OPEN,
    Array,
    CurveError,
    Interval,
    Record,
    quantile_interval,
)
from scalerl_jax.scaling.result import Fit
from scalerl_jax.scaling.search import A
from scalerl_jax.scaling.uncertainty import student_quantile

NUM_RESAMPLES = 400
ZERO = Interval(0.0, 0.0)
FIELDS_OF_FIT = (  # that a row of a table repeats
    *("asymptote", "asymptote_interval", "exponent", "exponent_interval"),
    *("midpoint", "midpoint_interval", "identified", "reason"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """Two recipes, a and b; differences are a minus b.

    `rule_winner` is the paper's answer, `test_winner` that of the intervals; either
    may be None: "not decided".
    """

    names: tuple[str, str]
    asymptotes: tuple[float, float]
    exponents: tuple[float, float]
    midpoints: tuple[float, float]
    identified: tuple[bool, bool]
    margin: float  # |dA| up to which the paper calls two asymptotes equal
    equal_asymptotes: bool  # by the margin
    # The mean A, held in the second fits; None where A is not identified, or is not
    # shared: further apart than the margin, with intervals that do not overlap.
    shared_asymptote: float | None
    exponents_at_shared: tuple[float, float] | None
    midpoints_at_shared: tuple[float, float] | None
    rule_winner: str | None
    rule: str  # in words, with the numbers

    test: str  # what was resampled
    level: float
    asymptote_difference: Interval
    # With A held at the shared value; None where the intervals of A do not overlap.
    exponent_difference: Interval | None
    rate_difference: Interval  # of the curves, at `compared_at`
    compared_at: float  # the last compute that both runs reached
    test_winner: str | None
    verdict: str  # in words, with the numbers
    warnings: tuple[str, ...]


def hold_asymptote(fit: Fit, asymptote: float) -> Fit:
    """Fit a curve again with A held (the paper's fixed-A refit)."""
    held = {**fit.problem.held, A: asymptote}
    return estimate(fit.curve, fit.settings, held, fit.parameters["R0"].source)


def _share(a: Fit, b: Fit) -> tuple[float, tuple[Fit, Fit]]:
    """Return the mean A of two runs, and both fitted with it."""
    shared = 0.5 * (a.asymptote + b.asymptote)
    return shared, (hold_asymptote(a, shared), hold_asymptote(b, shared))


def compare(
    a: Fit,
    b: Fit,
    *,
    names: tuple[str, str] = ("a", "b"),
    margin: float = ASYMPTOTE_MARGIN,
    prompt_rates: tuple[ArrayLike, ArrayLike] | None = None,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compare two runs, a and b, fitted with the sigmoid over the same x.

    The rule (https://arxiv.org/abs/2510.13786, appendix A.7): if |A_a - A_b| is within
    the margin, refit both with the mean A, and the higher B wins; else the higher A.

    The test: refits of resampled prompts, the same ones for both runs, so that their
    choice cancels; without `prompt_rates`, of each run's residuals (`bootstrap`).  The
    first difference whose interval excludes 0 decides, in the paper's order A, B (only
    A where its two intervals do not overlap, as no A fits both); if an A is not
    identified, that of the curves where both end; with a flat or falling run, none.

    Args:
        margin: between the asymptotes of equal recipes.
        prompt_rates: [n_a, P] and [n_b, P], or seeds in front, at the fitted points.
    """
    require_sigmoids({names[0]: a, names[1]: b})
    both = a.identified and b.identified
    equal = abs(a.asymptote - b.asymptote) <= margin
    overlap = both and a.asymptote_interval.overlaps(b.asymptote_interval)
    shared, held = _share(a, b) if both and (equal or overlap) else (None, None)
    exponents = held and (held[0].exponent, held[1].exponent)
    pair = exponents if equal and exponents else (a.asymptote, b.asymptote)
    y, test = _resample(a, b, prompt_rates, num_resamples, seed)
    differences = _differences(a, b, y, shared if overlap else None)
    by_asymptote, by_exponent, by_rate = differences
    considered = differences[:2] if both else differences[2:]
    test_winner = _winner(considered if a.climbs and b.climbs else (), names)
    return Comparison(
        names=names,
        asymptotes=(a.asymptote, b.asymptote),
        exponents=(a.exponent, b.exponent),
        midpoints=(a.midpoint, b.midpoint),
        identified=(a.identified, b.identified),
        margin=margin,
        equal_asymptotes=equal,
        shared_asymptote=shared,
        exponents_at_shared=exponents,
        midpoints_at_shared=held and (held[0].midpoint, held[1].midpoint),
        rule_winner=names[int(pair[0] <= pair[1])] if both else None,
        rule=_rule_text(a, b, names, margin, held),
        test=test,
        level=a.level,
        asymptote_difference=by_asymptote,
        exponent_difference=by_exponent,
        rate_difference=by_rate,
        compared_at=min(a.x_last, b.x_last),
        test_winner=test_winner,
        verdict=_verdict_text(names, differences, test_winner, (a, b)),
        warnings=_warnings(a, b, names),
    )


def _differences(
    a: Fit, b: Fit, y: tuple[Array, Array], shared: float | None
) -> tuple[Interval, Interval | None, Interval]:
    """Return the intervals of A, of B at a shared A, and of the curves' common end."""
    theta = refit(a, y[0])[0], refit(b, y[1])[0]
    end, exponents = min(a.x_last, b.x_last), None
    if shared is not None:
        of_a, of_b = (
            fit.public(refit(fit, curves, asymptote=shared)[0])["B"]
            for fit, curves in zip((a, b), y, strict=True)
        )
        exponents = quantile_interval(of_a - of_b, a.level)
    rates = a.curves(theta[0], end)[:, 0] - b.curves(theta[1], end)[:, 0]
    return (
        quantile_interval(theta[0][:, A] - theta[1][:, A], a.level),
        exponents,
        quantile_interval(rates, a.level),
    )


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


def _resample(
    a: Fit,
    b: Fit,
    prompt_rates: tuple[ArrayLike, ArrayLike] | None,
    num_resamples: int,
    seed: int,
) -> tuple[tuple[Array, Array], str]:
    """Return resampled curves [K, n] of both runs, and what was resampled."""
    if prompt_rates is None:
        y = (
            draw_residual_curves(a, num_resamples, seed=2 * seed),
            draw_residual_curves(b, num_resamples, seed=2 * seed + 1),
        )
        return y, "residuals of each run"
    rates = [
        check_rates(fit.problem.t, given).mean(axis=0)
        for fit, given in zip((a, b), prompt_rates, strict=True)
    ]
    if rates[0].shape[1] != rates[1].shape[1]:
        raise CurveError(
            f"prompt_rates are of {rates[0].shape[1]} and {rates[1].shape[1]} prompts; "
            "a paired test needs the same prompts in both runs"
        )
    num_prompts = rates[0].shape[1]
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(
        num_prompts, np.full(num_prompts, 1 / num_prompts), num_resamples
    )
    y = counts @ rates[0].T / num_prompts, counts @ rates[1].T / num_prompts
    return y, f"{num_prompts} paired prompts"


def _winner(
    differences: Sequence[Interval | None], names: tuple[str, str]
) -> str | None:
    """Return who is better by the first interval of a - b that leaves out 0."""
    for difference in filter(None, differences):
        if difference.is_above(ZERO):
            return names[0]
        if ZERO.is_above(difference):
            return names[1]
    return None


def _rule_text(
    a: Fit, b: Fit, names: tuple[str, str], margin: float, held: tuple[Fit, Fit] | None
) -> str:
    """Say the paper's rule with its numbers."""
    gap = abs(a.asymptote - b.asymptote)
    if not (a.identified and b.identified):
        pairs = list(zip(names, (a, b), strict=True))
        said = [
            f"{n} {'is flat' if f.flat else 'falls'}" for n, f in pairs if not f.climbs
        ]
        missing = [n for n, f in pairs if f.climbs and not f.identified]
        if missing:
            said.append(f"A of {' and '.join(missing)} is not identified")
        return f"not decided: {', '.join(said)}"
    if held is not None and gap <= margin:
        mean = 0.5 * (a.asymptote + b.asymptote)
        return (
            f"|dA| = {gap:.3f} is within {margin:g}; with A held at {mean:.4f}, B is "
            f"{held[0].exponent:.3f} for {names[0]} and {held[1].exponent:.3f} for "
            f"{names[1]}"
        )
    return f"|dA| = {gap:.3f} is more than {margin:g}: the higher A decides"


def _verdict_text(
    names: tuple[str, str],
    differences: Sequence[Interval | None],
    winner: str | None,
    fits: tuple[Fit, Fit],
) -> str:
    """Say the test with its numbers."""
    a, end = fits[0], min(fit.x_last for fit in fits)
    both = all(fit.identified for fit in fits)
    labels = ("A", "B at the shared A", f"{a.y_name} at {a.x_name} = {end:.4g}")
    used = slice(0, 2) if both else slice(2, 3)
    said = ", ".join(
        f"{label} {_show(difference)}"
        for label, difference in zip(labels[used], differences[used], strict=True)
        if difference is not None
    )
    ending = f"{winner} is better" if winner else "no difference is shown"
    still = [name for name, fit in zip(names, fits, strict=True) if not fit.climbs]
    if still:
        ending = f"not decided: {' and '.join(still)} does not climb"
    return f"{names[0]} - {names[1]}: {said}; {ending}"


def _show(interval: Interval) -> str:
    low = "-inf" if interval.low is None else f"{interval.low:+.4f}"
    high = "inf" if interval.high is None else f"{interval.high:+.4f}"
    return f"[{low}, {high}]"


def _warnings(a: Fit, b: Fit, names: tuple[str, str]) -> tuple[str, ...]:
    """Return what limits the comparison."""
    found = [
        "one run each: seeds alone moved A by up to 0.015 in the paper, which neither "
        "the rule's margin nor the test's intervals measure here"
    ]
    if a.initial_reward_source != b.initial_reward_source:
        found.append(
            f"R0 is {a.initial_reward_source} for {names[0]} and "
            f"{b.initial_reward_source} for {names[1]}: A and B depend on it"
        )
    if max(a.x_last, b.x_last) > 2.0 * min(a.x_last, b.x_last):
        found.append(
            f"the runs end at {a.x_last:.4g} and {b.x_last:.4g}: fits of different "
            "windows differ more than fits of one"
        )
    return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRow(Record):
    """One run in a table of many (leave-one-out).

    What is held at the shared A is None for a run whose interval of A does not
    overlap that of the highest A: no A fits both.
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
    """Many runs by rank; those of one rank by B at the shared A."""

    x_name: str
    y_name: str
    margin: float
    # Mean A of the runs whose intervals overlap that of the highest A; None: no A is
    # identified.
    shared_asymptote: float | None
    rows: tuple[RunRow, ...]  # by rank
    warnings: tuple[str, ...]


def compare_many(
    fits: Mapping[str, Fit], *, margin: float = ASYMPTOTE_MARGIN
) -> RunTable:
    """Rank many runs by A; runs whose A the data do not tell apart share a rank.

        rank = 1 + number of runs with a higher A

    where an A counts as higher if its interval lies above the other's and the two are
    further apart than the margin.  Runs that share a rank are ordered as the paper's
    leave-one-out table orders equal A: by B with A held at the shared value.  Runs
    whose A is not identified have no rank and come last.

    Args:
        fits: of the sigmoid, by name of run.
        margin: between the asymptotes of equal recipes.
    """
    if not fits:
        raise CurveError("no runs to compare; give at least one fit")
    require_sigmoids(fits)
    sure = {name: fit for name, fit in fits.items() if fit.identified}
    ranks = {name: 1 + _num_higher(fit, sure, margin) for name, fit in sure.items()}
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
    warnings = (f"A is not identified for {', '.join(unsure)}: no rank",)
    first = next(iter(fits.values()))
    return RunTable(
        x_name=first.x_name,
        y_name=first.y_name,
        margin=margin,
        shared_asymptote=shared,
        rows=rows,
        warnings=warnings if unsure else (),
    )


def _num_higher(fit: Fit, others: Mapping[str, Fit], margin: float) -> int:
    """Return how many runs have an A that is higher for certain."""
    return sum(
        other.asymptote_interval.is_above(fit.asymptote_interval)
        and other.asymptote > fit.asymptote + margin
        for other in others.values()
    )


def _hold_shared(
    fits: Mapping[str, Fit], sure: Mapping[str, Fit]
) -> tuple[float | None, dict[str, Fit]]:
    """Return the shared A, and the runs that it may be held for, fitted with it."""
    if not sure:
        return None, {}
    best = max(sure.values(), key=lambda fit: fit.asymptote).asymptote_interval
    near = {n: f for n, f in fits.items() if f.asymptote_interval.overlaps(best)}
    shared = float(np.mean([f.asymptote for n, f in near.items() if n in sure]))
    return shared, {name: hold_asymptote(fit, shared) for name, fit in near.items()}


def linearise(fit: Fit) -> Array:
    """ScaleRL's straight-line form of a sigmoid's points: log F over log x has slope B.

        F(R) = C_mid^B / ((A - R0) / (R - R0) - 1) = x^B

    NaN where a noisy point is not between R0 and A, where the form has no value.
    https://arxiv.org/abs/2510.13786, leave-one-out figure.
    """
    rise, height = fit.curve.y - fit.initial_reward, fit.asymptote - fit.initial_reward
    between = (rise > 0) & (fit.curve.y < fit.asymptote)
    form = np.full(rise.shape, np.nan)
    form[between] = fit.midpoint**fit.exponent / (height / rise[between] - 1.0)
    return form


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledParameter(Record):
    """One parameter over seeds; no mean of what a seed does not fix."""

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

    The interval of `parameters` is that of the recipe: it holds what seeds change.
    `fit` is of all points together, with intervals as if they had no seeds.
    """

    law: str
    num_seeds: int
    level: float
    parameters: dict[str, PooledParameter]
    identified: bool  # by every seed
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
    """Return mean and spread of one parameter, of its logarithm if it is no rate."""
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
    error = float(scale.std(ddof=1)) / np.sqrt(len(values))
    reach = student_quantile(level, len(values) - 1) * error
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
    """Fit the points of all seeds by compute, each counting alike.

    R0 is the mean of those given; else it is observed once by each seed that has a
    step 0, if all have one.
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
    )
    return fit_alone(pooled, settings)
