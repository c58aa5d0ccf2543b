"""Comparing two recipes: the paper's rule, and beside it a test with intervals.

The rule has no notion of noise; the test has none of seeds: two single runs can
differ by their seeds alone (A by 0.015 in the paper).  Pool seeds with `pool_seeds`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
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
from scalerl_jax.scaling.laws import Array
from scalerl_jax.scaling.records import Interval, Record, quantile_interval
from scalerl_jax.scaling.result import Fit
from scalerl_jax.scaling.search import A

NUM_RESAMPLES = 400


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
    """The same curve fitted again with A held (the paper's fixed-A refit)."""
    held = {**fit.problem.held, A: asymptote}
    source = fit.parameters["R0"].source
    return estimate(fit.curve, fit.settings, fit.definition, held, source)


def _share(a: Fit, b: Fit) -> tuple[float, tuple[Fit, Fit]]:
    """The mean A of two runs, and both fitted with it."""
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
    """Compare two runs, fitted with the sigmoid.

    The rule (https://arxiv.org/abs/2510.13786, appendix A.7): if |A_a - A_b| is within
    the margin, refit both with the mean A, and the higher B wins; else the higher A.

    The test: refits of resampled prompts, the same ones for both runs, so that their
    choice cancels; without `prompt_rates`, of each run's residuals (`bootstrap`).  The
    first difference whose interval excludes 0 decides, in the paper's order A, B (only
    A where its two intervals do not overlap, as no A fits both); if an A is not
    identified, that of the curves where both end; with a flat or falling run, none.

    Args:
        a: a fit of the sigmoid.
        b: another, on the same x.
        names: of the runs.
        margin: between the asymptotes of equal recipes.
        prompt_rates: [n_a, P] and [n_b, P], or seeds in front; of the same P prompts
            at each fitted evaluation, with step 0 if it is one.
        num_resamples: of the test.
        seed: of its draws.
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
    considered = differences[:2] if both else differences[2:]
    test_winner = _winner(considered if a.climbs and b.climbs else (), names)
    return Comparison(
        names=names,
        **_both(a, b),
        margin=margin,
        equal_asymptotes=equal,
        shared_asymptote=shared,
        exponents_at_shared=exponents,
        midpoints_at_shared=held and (held[0].midpoint, held[1].midpoint),
        rule_winner=names[int(pair[0] <= pair[1])] if both else None,
        rule=_rule_text(a, b, names, margin, held),
        test=test,
        asymptote_difference=differences[0],
        exponent_difference=differences[1],
        rate_difference=differences[2],
        test_winner=test_winner,
        verdict=_verdict_text(names, differences, both, test_winner, (a, b)),
        warnings=_warnings(a, b, names),
    )


def _both(a: Fit, b: Fit) -> dict[str, Any]:
    """What a comparison repeats of the two fits, and where both still have data."""
    return {
        "asymptotes": (a.asymptote, b.asymptote),
        "exponents": (a.exponent, b.exponent),
        "midpoints": (a.midpoint, b.midpoint),
        "identified": (a.identified, b.identified),
        "level": a.level,
        "compared_at": min(a.x_last, b.x_last),
    }


def _differences(
    a: Fit, b: Fit, y: tuple[Array, Array], shared: float | None
) -> tuple[Interval, Interval | None, Interval]:
    """Intervals of A, of B at a shared A, and of the curves where both end."""
    theta = refit(a, y[0])[0], refit(b, y[1])[0]
    end, exponents = min(a.x_last, b.x_last), None
    if shared is not None:
        gap = a.public(refit_with_asymptote(a, y[0], shared))["B"]
        gap = gap - b.public(refit_with_asymptote(b, y[1], shared))["B"]
        exponents = quantile_interval(gap, a.level)
    rates = a.curves(theta[0], end)[:, 0] - b.curves(theta[1], end)[:, 0]
    return (
        quantile_interval(theta[0][:, A] - theta[1][:, A], a.level),
        exponents,
        quantile_interval(rates, a.level),
    )


def require_sigmoids(fits: Mapping[str, Fit]) -> None:
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
    """Who is better by the first interval of a - b that leaves out 0."""
    for difference in differences:
        if difference is None:
            continue
        if difference.low is not None and difference.low > 0:
            return names[0]
        if difference.high is not None and difference.high < 0:
            return names[1]
    return None


def _rule_text(
    a: Fit,
    b: Fit,
    names: tuple[str, str],
    margin: float,
    held: tuple[Fit, Fit] | None,
) -> str:
    """The paper's rule with its numbers."""
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
    both: bool,
    winner: str | None,
    fits: tuple[Fit, Fit],
) -> str:
    """The test with its numbers."""
    a, end = fits[0], min(fit.x_last for fit in fits)
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
