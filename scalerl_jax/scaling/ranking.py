"""Ranking many runs: the paper's leave-one-out table, with ties."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from scalerl_jax.scaling.compare import hold_asymptote, require_sigmoids
from scalerl_jax.scaling.curves import CurveError
from scalerl_jax.scaling.judge import ASYMPTOTE_MARGIN
from scalerl_jax.scaling.laws import Array, linearised
from scalerl_jax.scaling.records import Interval, Record
from scalerl_jax.scaling.result import Fit


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
        _row(
            name,
            fits[name],
            held.get(name),
            within_margin=name in sure and fits[name].asymptote >= top - margin,
            rank=ranks.get(name),
            tied=name in ranks and places.count(ranks[name]) > 1,
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
    """How many runs have an A that is higher for certain."""
    return sum(
        other.asymptote_interval.is_above(fit.asymptote_interval)
        and other.asymptote > fit.asymptote + margin
        for other in others.values()
    )


def _hold_shared(
    fits: Mapping[str, Fit], sure: Mapping[str, Fit]
) -> tuple[float | None, dict[str, Fit]]:
    """The shared A, and the runs that it may be held for, fitted with it."""
    if not sure:
        return None, {}
    best = max(sure.values(), key=lambda fit: fit.asymptote).asymptote_interval
    near = {n: f for n, f in fits.items() if f.asymptote_interval.overlaps(best)}
    shared = float(np.mean([f.asymptote for n, f in near.items() if n in sure]))
    return shared, {name: hold_asymptote(fit, shared) for name, fit in near.items()}


def _row(name: str, fit: Fit, held: Fit | None, **place: Any) -> RunRow:
    """One run of the table; `place` says where it stands in it."""
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
        shared_exponent=None if held is None else held.exponent,
        shared_midpoint=None if held is None else held.midpoint,
        x=fit.curve.x,
        linearised=None if held is None else linearise(held),
        fit=fit,
        fit_at_shared=held,
        **place,
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
