"""Comparing recipes: the paper's rule, and beside it a test with intervals.

The rule has no notion of noise; the test has none of seeds: two single runs can
differ by their seeds alone (A by 0.015 in the paper).  Pool seeds with `pool_seeds`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scalerl_jax.scaling.bootstrap import (
    check_rates,
    draw_residual_curves,
    refit,
    refit_with_asymptote,
)
from scalerl_jax.scaling.curves import CurveError
from scalerl_jax.scaling.estimate import estimate
from scalerl_jax.scaling.judge import ASYMPTOTE_MARGIN
from scalerl_jax.scaling.laws import Array, linearised
from scalerl_jax.scaling.records import Interval, Record, quantile_interval
from scalerl_jax.scaling.result import Fit
from scalerl_jax.scaling.search import A

NUM_RESAMPLES = 400
DIFFERENCES = ("asymptote_difference", "exponent_difference", "rate_difference")


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
    shared_asymptote: float  # the mean A, held in the second fits
    exponents_at_shared: tuple[float, float]
    midpoints_at_shared: tuple[float, float]
    rule_winner: str | None
    rule: str  # in words, with the numbers

    test: str  # what was resampled
    level: float
    asymptote_difference: Interval
    exponent_difference: Interval  # with A held at the shared value
    rate_difference: Interval  # of the curves, at `compared_at`
    compared_at: float  # the last compute that both runs reached
    test_winner: str | None
    verdict: str  # in words, with the numbers
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRow(Record):
    """One run in a table of many (leave-one-out)."""

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
    shared_exponent: float  # B and C_mid with A held at the shared value
    shared_midpoint: float
    rank: int  # by the paper's priorities, 1 is best
    x: Array = dataclasses.field(repr=False)  # [n] compute
    linearised: Array = dataclasses.field(repr=False)  # [n] F(R) at the shared A
    fit: Fit = dataclasses.field(repr=False)
    fit_at_shared: Fit = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTable(Record):
    """Many runs, ranked: A first, B at a shared A among those that tie."""

    x_name: str
    y_name: str
    margin: float
    shared_asymptote: float  # mean A of the identified runs
    rows: tuple[RunRow, ...]  # by rank
    warnings: tuple[str, ...]


def hold_asymptote(fit: Fit, asymptote: float) -> Fit:
    """The same curve fitted again with A held (the paper's fixed-A refit)."""
    held = {**fit.problem.held, A: asymptote}
    source = fit.parameters["R0"].source
    return estimate(fit.curve, fit.settings, fit.definition, held, source)


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
    """Compare two runs, fitted with the sigmoid.

    The rule (https://arxiv.org/abs/2510.13786, appendix A.7): if |A_a - A_b| is at
    most the margin, refit both with A held at the mean, and the higher B wins;
    otherwise the higher A wins.

    The test: refits of resampled prompts, the same ones for both runs, so that their
    choice cancels; without `prompt_rates`, of each run's residuals (`bootstrap`).  The
    first difference whose interval excludes 0 decides, in the paper's order A, B; if
    an A is not identified, that of the curves where both runs end.

    Args:
        a: a fit of the sigmoid.
        b: another, on the same x.
        names: of the runs.
        margin: between the asymptotes of equal recipes.
        prompt_rates: [n_a, P] and [n_b, P], or seeds in front; pass rates of the
            same P prompts at each fitted evaluation.
        num_resamples: of the test.
        seed: of its draws.
    """
    _require_sigmoids({names[0]: a, names[1]: b})
    shared = 0.5 * (a.asymptote + b.asymptote)
    held = hold_asymptote(a, shared), hold_asymptote(b, shared)
    equal = abs(a.asymptote - b.asymptote) <= margin
    both = a.identified and b.identified
    exponents = held[0].exponent, held[1].exponent
    pair = exponents if equal else (a.asymptote, b.asymptote)
    y, test = _resample(a, b, prompt_rates, num_resamples, seed)
    end, differences = min(a.x_last, b.x_last), _differences(a, b, y, shared)
    considered = differences[:2] if both else differences[2:]
    test_winner = next(filter(None, (_winner(d, names) for d in considered)), None)
    return Comparison(
        names=names,
        **_both(a, b),
        margin=margin,
        equal_asymptotes=equal,
        shared_asymptote=shared,
        exponents_at_shared=exponents,
        midpoints_at_shared=(held[0].midpoint, held[1].midpoint),
        rule_winner=names[int(pair[0] <= pair[1])] if both else None,
        rule=_rule_text(a, b, names, margin, held),
        test=test,
        level=a.level,
        **dict(zip(DIFFERENCES, differences, strict=True)),
        compared_at=end,
        test_winner=test_winner,
        verdict=_verdict_text(names, differences, both, test_winner, end, a),
        warnings=_warnings(a, b, names),
    )


def _both(a: Fit, b: Fit) -> dict[str, Any]:
    """What a comparison repeats of the two fits."""
    return {
        "asymptotes": (a.asymptote, b.asymptote),
        "exponents": (a.exponent, b.exponent),
        "midpoints": (a.midpoint, b.midpoint),
        "identified": (a.identified, b.identified),
    }


def _differences(
    a: Fit, b: Fit, y: tuple[Array, Array], shared: float
) -> list[Interval]:
    """Of A, of B at the shared A, and of the curves where both end, over refits."""
    theta = refit(a, y[0])[0], refit(b, y[1])[0]
    held = refit_with_asymptote(a, y[0], shared), refit_with_asymptote(b, y[1], shared)
    end = min(a.x_last, b.x_last)
    pairs = (
        (theta[0][:, A], theta[1][:, A]),
        (a.public(held[0])["B"], b.public(held[1])["B"]),
        (a.curves(theta[0], end)[:, 0], b.curves(theta[1], end)[:, 0]),
    )
    return [quantile_interval(first - second, a.level) for first, second in pairs]


def _require_sigmoids(fits: Mapping[str, Fit]) -> None:
    """All fits are of the sigmoid, over the same x."""
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
    """Resampled curves [K, n] of both runs, and what was resampled."""
    if prompt_rates is None:
        y = (
            draw_residual_curves(a, num_resamples, seed=2 * seed),
            draw_residual_curves(b, num_resamples, seed=2 * seed + 1),
        )
        return y, "residuals of each run"
    rates = [
        check_rates(fit.curve.x, given).mean(axis=0)
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


def _winner(difference: Interval, names: tuple[str, str]) -> str | None:
    """Who is better, if the interval of a - b leaves out 0."""
    if difference.low is not None and difference.low > 0:
        return names[0]
    if difference.high is not None and difference.high < 0:
        return names[1]
    return None


def _rule_text(
    a: Fit, b: Fit, names: tuple[str, str], margin: float, held: tuple[Fit, Fit]
) -> str:
    """The paper's rule with its numbers."""
    gap = abs(a.asymptote - b.asymptote)
    if not (a.identified and b.identified):
        missing = [n for n, f in zip(names, (a, b), strict=True) if not f.identified]
        return f"not decided: A of {' and '.join(missing)} is not identified"
    if gap <= margin:
        mean = 0.5 * (a.asymptote + b.asymptote)
        return (
            f"|dA| = {gap:.3f} is within {margin:g}; with A held at {mean:.4f}, B is "
            f"{held[0].exponent:.3f} for {names[0]} and {held[1].exponent:.3f} for "
            f"{names[1]}"
        )
    return f"|dA| = {gap:.3f} is more than {margin:g}: the higher A decides"


def _verdict_text(
    names: tuple[str, str],
    differences: list[Interval],
    both: bool,
    winner: str | None,
    end: float,
    a: Fit,
) -> str:
    """The test with its numbers."""
    labels = ("A", "B at the shared A", f"{a.y_name} at {a.x_name} = {end:.4g}")
    used = (0, 1) if both else (2,)
    said = ", ".join(f"{labels[i]} {_show(differences[i])}" for i in used)
    ending = f"{winner} is better" if winner else "no difference is shown"
    return f"{names[0]} - {names[1]}: {said}; {ending}"


def _show(interval: Interval) -> str:
    low = "-inf" if interval.low is None else f"{interval.low:+.4f}"
    high = "inf" if interval.high is None else f"{interval.high:+.4f}"
    return f"[{low}, {high}]"


def _warnings(a: Fit, b: Fit, names: tuple[str, str]) -> tuple[str, ...]:
    """What limits the comparison."""
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


def compare_many(
    fits: Mapping[str, Fit], *, margin: float = ASYMPTOTE_MARGIN
) -> RunTable:
    """Rank many runs as the paper's leave-one-out table does.

    Runs whose A is within the margin of the highest tie in A; B and C_mid are
    compared with A held at the mean of the identified runs' A.  Runs that are not
    identified come last.

    Args:
        fits: of the sigmoid, by name of run.
        margin: between the asymptotes of equal recipes.
    """
    if not fits:
        raise CurveError("no runs to compare; give at least one fit")
    _require_sigmoids(fits)
    sure = {name: fit for name, fit in fits.items() if fit.identified}
    shared = float(np.mean([fit.asymptote for fit in (sure or fits).values()]))
    top = max((fit.asymptote for fit in sure.values()), default=1.0)
    held = {name: hold_asymptote(fit, shared) for name, fit in fits.items()}

    def order(name: str) -> tuple[bool, float, float]:
        fit = fits[name]
        tied = fit.identified and fit.asymptote >= top - margin
        level = top if tied else fit.asymptote
        return (not fit.identified, -level, -held[name].exponent)

    rows = tuple(
        _row(name, fits[name], held[name], rank, top - margin)
        for rank, name in enumerate(sorted(fits, key=order), start=1)
    )
    unsure = [name for name in fits if name not in sure]
    warnings = (
        (f"A is not identified for {', '.join(unsure)}: they are ranked last",)
        if unsure
        else ()
    )
    first = next(iter(fits.values()))
    return RunTable(
        x_name=first.x_name,
        y_name=first.y_name,
        margin=margin,
        shared_asymptote=shared,
        rows=rows,
        warnings=warnings,
    )


def _row(name: str, fit: Fit, held: Fit, rank: int, tie_from: float) -> RunRow:
    """One run of the table."""
    return RunRow(
        name=name,
        asymptote=fit.asymptote,
        asymptote_interval=fit.asymptote_interval,
        exponent=fit.exponent,
        exponent_interval=fit.exponent_interval,
        midpoint=fit.midpoint,
        midpoint_interval=fit.midpoint_interval,
        identified=fit.identified,
        reason=fit.reason,
        within_margin=fit.identified and fit.asymptote >= tie_from,
        shared_exponent=held.exponent,
        shared_midpoint=held.midpoint,
        rank=rank,
        x=fit.curve.x,
        linearised=linearise(held),
        fit=fit,
        fit_at_shared=held,
    )


def linearise(fit: Fit) -> Array:
    """F(R) [n] of the fitted points of a sigmoid: log F over log x has slope B.

    NaN where a noisy point is not between R0 and A.
    """
    return linearised(
        fit.curve.y,
        initial_reward=fit.initial_reward,
        asymptote=fit.asymptote,
        midpoint_power=fit.midpoint**fit.exponent,
    )
