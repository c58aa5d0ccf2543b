"""Fit of one curve: its parameters, their intervals, and the verdict.

This module decides what is fitted and what is held; `estimate.py` makes one fit.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scalerl_jax.scaling.estimate import (
    climb_chance,
    estimate,
    make_problem,
    search_problem,
)
from scalerl_jax.scaling.identifiability import (
    FALSE_CLIMBS,
    doubtful_start,
    late_warnings,
)
from scalerl_jax.scaling.laws import LAWS, Law
from scalerl_jax.scaling.protocol import fit_on_grids, paper_settings
from scalerl_jax.scaling.records import (
    DEFAULT_X,
    DEFAULT_Y,
    Curve,
    CurveError,
    Interval,
    Record,
    Source,
    TooFewPointsError,
    amount,
    make_curve,
)
from scalerl_jax.scaling.result import LAST_POINTS, Fit, Forecast, Settings
from scalerl_jax.scaling.search import R0, A
from scalerl_jax.scaling.uncertainty import mean_curve

# Early cut-offs of the sensitivity table, as shares of the last compute.
CUTOFF_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)


def fit(
    x: ArrayLike,
    y: ArrayLike,
    *,
    standard_errors: ArrayLike | None = None,
    x_name: str = DEFAULT_X,
    y_name: str = DEFAULT_Y,
    **settings: Any,
) -> Fit:
    """Fit a scaling law to one curve, by least squares.

        R(x) = R0 + (A - R0) / (1 + (C_mid / x)^B),  0 <= A <= 1

    for the default law; https://arxiv.org/abs/2510.13786, equation 1, with the grid
    of appendix A.7 replaced by variable projection and descent.  Nothing is random.

    Args:
        x: [n] compute, increasing, any unit; a first value of 0 observes R0.
        y: [n] pass rates in [0, 1].
        standard_errors: [n] of y; points weigh 1 / standard_error^2.
        x_name: what x is, with its unit, for messages and reports.
        settings: fields of `Settings` by name: law, initial_reward, fit_from, robust,
            protocol, level, errors_known.

    Raises:
        CurveError: the input cannot be fitted; the message says how to mend it.
    """
    curve = make_curve(x, y, y_se=standard_errors, names=(x_name, y_name))
    return fit_curve(curve, weighted=standard_errors is not None, **settings)


def fit_curve(curve: Curve, settings: Settings | None = None, **changes: Any) -> Fit:
    """Fit a scaling law to a curve that is already checked, as `fit` does.

    Args:
        curve: from `make_curve` or a reader.
        changes: fields of `Settings` by name, which override `settings`.
    """
    chosen = dataclasses.replace(settings or Settings(), **changes)
    check_settings(chosen)
    if chosen.protocol == "paper":
        chosen = paper_settings(curve, chosen)
    result = fit_alone(curve, chosen)
    result = dataclasses.replace(
        result,
        warnings=(
            *doubtful_start(result),
            *result.curve.warnings,
            *result.warnings,
            *late_warnings(result),
        ),
        half_forecast=_forecast_from_half(result),
    )
    return fit_on_grids(result) if chosen.protocol == "paper" else result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cutoff(Record):
    """One row of the sensitivity table: the fit from one cut-off on."""

    fit_from: float  # points with 0 < x < fit_from are left out
    num_points: int
    # Of the parameters; empty if the fit failed.
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    # Of the fitted parameters.
    intervals: dict[str, Interval] = dataclasses.field(default_factory=dict)
    identified: bool = False
    reason: str | None  # why not identified, or not fitted


def sensitivity(fit: Fit, cutoffs: Sequence[float] | None = None) -> tuple[Cutoff, ...]:
    """Fit again without early points, to show how the fit changes.

    Args:
        fit: its whole curve is fitted again; give one made without an earlier cut.
        cutoffs: in the unit of x; by default 0 and the first 2, 5, 10, 15, 20 and
            30 % of the last compute, and the fit's own.
    """
    if cutoffs is None:
        own = fit.settings.fit_from
        shares = [share * fit.x_last for share in CUTOFF_SHARES]
        within = [share for share in shares if share > fit.whole_curve.x[0]]
        cutoffs = sorted({0.0, *within, *([] if own is None else [own])})
    return tuple(_cutoff(fit, float(cutoff)) for cutoff in cutoffs)


def _cutoff(fit: Fit, cutoff: float) -> Cutoff:
    """Fit the points from a cut-off on."""
    settings = dataclasses.replace(fit.settings, fit_from=cutoff)
    try:
        found = quick_fit(fit.whole_curve, settings)
    except CurveError as failure:
        count = int((fit.whole_curve.x >= cutoff).sum())
        return Cutoff(fit_from=cutoff, num_points=count, reason=str(failure))
    fitted = {n: p.interval for n, p in found.parameters.items() if p.interval}
    return Cutoff(
        fit_from=cutoff,
        num_points=found.num_points,
        values={name: p.value for name, p in found.parameters.items()},
        intervals=fitted,
        identified=found.identified,
        reason=found.reason,
    )


def check_settings(settings: Settings) -> None:
    """Refuse settings outside their limits, with the way out."""
    if settings.law not in LAWS:
        raise CurveError(f"--law = {settings.law!r}; choose from {sorted(LAWS)}")
    if not 0 < settings.level < 1:
        raise CurveError(
            f"level = {settings.level:g}; give a share in (0, 1), such as 0.9"
        )
    r0 = settings.initial_reward
    if isinstance(r0, int | float) and not 0 <= r0 <= 1:
        raise CurveError(
            f"--r0 = {r0:g} is outside [0, 1], where pass rates lie; divide percent "
            "by 100, map a reward in [-1, 1] by (reward + 1) / 2"
        )
    if settings.protocol not in ("default", "paper"):
        raise CurveError(
            f"--protocol = {settings.protocol!r}; choose from ['default', 'paper']"
        )


def keep_from(curve: Curve, fit_from: float | None) -> Curve:
    """Return the curve without its points at x < fit_from; R0 stays."""
    if fit_from is None:
        return curve
    kept = curve.x >= fit_from
    if not kept.any():
        raise CurveError(
            f"--from {fit_from:g} leaves out every point: the last {curve.x_name} is "
            f"{curve.x[-1]:g}; give a smaller --from"
        )
    left_out = curve.num_left_out + int((~kept).sum())
    return dataclasses.replace(curve.part(kept), num_left_out=left_out)


def quick_fit(whole: Curve, settings: Settings) -> Fit:
    """Fit without the forecast from one half, which tables of fits do not show."""
    if settings.protocol == "paper":
        return fit_curve(whole, settings)
    check_settings(settings)
    return fit_alone(whole, settings)


def fit_alone(whole: Curve, settings: Settings) -> Fit:
    """Fit with R0 as the settings say, and once more with R0 free."""
    curve = keep_from(whole, settings.fit_from)
    law = LAWS[settings.law]
    held, source = _initial_reward(curve, settings, law)
    _require_points(curve, law, source)
    if law.held_asymptote is not None:
        held[A] = law.held_asymptote
    result = estimate(curve, settings, held, source)
    result = dataclasses.replace(result, whole_curve=whole)
    if source == "fitted" or not law.starts_at_r0:
        return result
    free = None
    if curve.x.size > 3 + law.has_v:
        rest = {column: value for column, value in held.items() if column != R0}
        free = estimate(curve, settings, rest, "fitted", selected=False)
        free = dataclasses.replace(free, whole_curve=whole)
    return require_both(result, free)


def require_both(result: Fit, free: Fit | None) -> Fit:
    """Return the fit with the free-R0 fit attached; identified only if both are."""
    result = dataclasses.replace(result, r0_free=free)
    if not result.identified or (free is not None and free.identified):
        return result
    reason = (
        f"{result.num_points} points are too few to fit R0 as well"
        if free is None
        else f"with R0 free: {free.reason}"
    )
    a = result.parameters["A"]
    opened = dataclasses.replace(a, interval=Interval(result.interval("A").low, None))
    return dataclasses.replace(
        result,
        identified=False,
        reason=reason,
        parameters={**result.parameters, "A": opened},
    )


def _initial_reward(
    curve: Curve, settings: Settings, law: Law
) -> tuple[dict[int, float], Source]:
    """Return the R0 to hold, if any, and its source.

    "given" is exact.  "measured" is an observation with noise, which only the paper's
    protocol holds.  "fitted" follows from the points after step 0.
    """
    given = settings.initial_reward
    if isinstance(given, int | float) and law.starts_at_r0:
        return {R0: float(given)}, "given"
    if given is not None or curve.r0 is None or not law.known_at_zero:
        return {}, "fitted"
    return {R0: curve.r0} if settings.protocol == "paper" else {}, "measured"


def _require_points(curve: Curve, law: Law, source: Source) -> None:
    """Raise TooFewPointsError if points do not outnumber parameters.

    A measured R0 counts as a point and as a parameter.
    """
    num_parameters = 3 + law.has_v - (source != "fitted")
    num_parameters -= law.held_asymptote is not None
    size = curve.x.size
    if size <= num_parameters:
        remedy = ", lower --from" if curve.num_left_out else ""
        if source == "fitted" and law.starts_at_r0:
            remedy += ", or give --r0 to fit one less"
        missing = num_parameters + 1 - size
        enough = curve.x[-1] * (1.0 + missing / (size + curve.num_left_out))
        raise TooFewPointsError(
            f"{size} point{'s' * (size > 1)} with {curve.x_name} > 0 cannot fix "
            f"{num_parameters} parameters; at least {num_parameters + 1} are needed: "
            f"{missing} evaluation{'s' * (missing > 1)} more, by about {curve.x_name} "
            f"= {amount(enough, digits=3)} at the rate so far, or evaluate more "
            f"often{remedy}",
            missing=missing,
        )


def _forecast_from_half(fit: Fit) -> Forecast | None:
    """Fit the points up to half of the last compute, and predict the last point."""
    curve, settings = fit.curve, fit.settings
    half = curve.x <= 0.5 * curve.x[-1]
    observed = fit.problem.observes_zero
    num_free = len(fit.problem.free) - observed
    if half.sum() <= num_free or np.ptp(curve.y[half]) == 0:
        return None
    first = curve.part(half)
    held, weighs = fit.problem.held, settings.weighs
    if climb_chance(first, settings, fit.definition) > FALSE_CLIMBS:
        predicted = float(first.y[-LAST_POINTS:].mean())  # as `Fit.forecast`
        return Forecast.of(first.x[-1], predicted, curve.y[-1])
    problem, _ = make_problem(
        first, fit.definition, held, weighted=weighs, observed=observed
    )
    problem, best, _, _ = search_problem(problem, robust=settings.robust)
    mean = mean_curve(problem, best, known=None, thinning=1.0)
    predicted = float(mean.rates(np.log(curve.x[-1:] / first.x[-1]))[0])
    return Forecast.of(first.x[-1], predicted, curve.y[-1])
