"""Fitting one curve: the numbers, their intervals, and their verdict.

The search is in `search.py`, the intervals in `uncertainty.py`; here they are put
together, judged, and warned about.  The paper's own procedure is in `protocol.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from scalerl_jax.scaling.averaging import mean_curve
from scalerl_jax.scaling.curves import (
    DEFAULT_X,
    DEFAULT_Y,
    Curve,
    CurveError,
    TooFewPointsError,
    make_curve,
)
from scalerl_jax.scaling.estimate import estimate, make_problem, search_problem
from scalerl_jax.scaling.judge import late_warnings
from scalerl_jax.scaling.laws import LAWS, Law
from scalerl_jax.scaling.records import Interval, Record
from scalerl_jax.scaling.result import Fit, Forecast, Settings, Source
from scalerl_jax.scaling.search import R0, A

# Early cut-offs of the sensitivity table, as shares of the last compute.
CUTOFF_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)


def fit(
    x: ArrayLike,
    y: ArrayLike,
    *,
    law: str = "sigmoid",
    standard_errors: ArrayLike | None = None,
    errors_known: bool = False,
    initial_reward: float | Literal["free"] | None = None,
    fit_from: float | None = None,
    robust: bool = False,
    protocol: Literal["default", "paper"] = "default",
    level: float = 0.9,
    x_name: str = DEFAULT_X,
    y_name: str = DEFAULT_Y,
) -> Fit:
    """Fit a scaling law to one curve, by least squares.

        R(x) = R0 + (A - R0) / (1 + (C_mid / x)^B),  0 <= A <= 1

    for the default law; https://arxiv.org/abs/2510.13786, equation 1, with the grid
    of appendix A.7 replaced by variable projection and descent.  Nothing is random.

    Args:
        x: [n] compute, increasing, any unit; a first value of 0 observes R0.
        y: [n] pass rates in [0, 1].
        law: one of `LAWS`: sigmoid, power, logistic, exponential, error_power.
        standard_errors: [n] of y; points weigh 1 / standard_error^2.
        errors_known: take the standard errors at their word; by default only their
            ratios count, and the scatter around the fit says how large they are.
        initial_reward: pass rate at zero compute, exactly, or "free" to leave a point
            at x = 0 out.  By default it is fitted, and such a point observes it.
        fit_from: points with 0 < x < fit_from are left out (the paper: 1.5k
            GPU-hours).
        robust: Huber's loss instead of squares, against single bad evaluations.
        protocol: "paper" searches the paper's grid, unweighted (`protocol.py`).
        level: of the profile-likelihood intervals, in (0, 1).
        x_name: what x is, with its unit, for messages and reports.
        y_name: what y is.

    Raises:
        CurveError: the input cannot be fitted; the message says how to mend it.
    """
    curve = make_curve(x, y, y_se=standard_errors, names=(x_name, y_name))
    return fit_curve(
        curve,
        law=law,
        initial_reward=initial_reward,
        fit_from=fit_from,
        robust=robust,
        protocol=protocol,
        level=level,
        errors_known=errors_known,
        weighted=standard_errors is not None,
    )


def fit_curve(
    curve: Curve,
    settings: Settings | None = None,
    **changes: Any,
) -> Fit:
    """`fit`, for a curve that is already checked.

    Args:
        curve: from `make_curve` or a reader.
        settings: how to fit; the fields of `Settings` may also be given by name.
        changes: fields of `Settings` by name.  `weighted`, 1 / curve.y_se^2, is off by
            default: the errors that come with evaluations are mostly those of the
            choice of prompts, which moves all points of a run together.
    """
    chosen = dataclasses.replace(settings or Settings(), **changes)
    check_settings(chosen)
    if chosen.protocol == "paper":
        from scalerl_jax.scaling.protocol import fit_as_paper

        return fit_as_paper(curve, chosen)
    return fit_checked(curve, chosen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cutoff(Record):
    """One row of the sensitivity table: the fit from one cut-off on."""

    fit_from: float  # points with 0 < x < fit_from are left out
    num_points: int
    values: dict[str, float]  # of the parameters
    intervals: dict[str, Interval]  # of the fitted ones
    identified: bool
    reason: str | None  # why not identified, or not fitted (then values are empty)


def sensitivity(fit: Fit, cutoffs: Sequence[float] | None = None) -> tuple[Cutoff, ...]:
    """How a fit changes with the early points that are left out.

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
    rows = []
    for cutoff in cutoffs:
        try:
            settings = dataclasses.replace(fit.settings, fit_from=float(cutoff))
            if fit.protocol == "paper":
                changed = fit_curve(fit.whole_curve, settings)
            else:
                changed = fit_alone(fit.whole_curve, settings)
        except CurveError as failure:
            rows.append(
                Cutoff(
                    fit_from=float(cutoff),
                    num_points=int((fit.whole_curve.x >= cutoff).sum()),
                    values={},
                    intervals={},
                    identified=False,
                    reason=str(failure),
                )
            )
            continue
        rows.append(
            Cutoff(
                fit_from=float(cutoff),
                num_points=changed.num_points,
                values={name: p.value for name, p in changed.parameters.items()},
                intervals={
                    name: p.interval
                    for name, p in changed.parameters.items()
                    if p.interval is not None
                },
                identified=changed.identified,
                reason=changed.reason,
            )
        )
    return tuple(rows)


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
    """The curve without its points at x < fit_from; R0 stays."""
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


def fit_alone(whole: Curve, settings: Settings) -> Fit:
    """The fit with R0 as asked for, without what is fitted beside it."""
    curve = keep_from(whole, settings.fit_from)
    law = LAWS[settings.law]
    held, source = _initial_reward(curve, settings, law)
    _require_points(curve, law, source)
    if law.held_asymptote is not None:
        held[A] = law.held_asymptote
    result = estimate(curve, settings, law, held, source)
    result = dataclasses.replace(result, whole_curve=whole)
    if source == "fitted" or not law.starts_at_r0:
        return result
    free = None
    if curve.x.size > 3 + law.has_v:
        rest = {column: value for column, value in held.items() if column != R0}
        free = estimate(curve, settings, law, rest, "fitted", selected=False)
        free = dataclasses.replace(free, whole_curve=whole)
    return require_both(result, free)


def fit_checked(whole: Curve, settings: Settings) -> Fit:
    """The fit with R0 as asked for and free, and once more from one half."""
    result = fit_alone(whole, settings)
    curve = result.curve
    return dataclasses.replace(
        result,
        warnings=(*curve.warnings, *result.warnings, *late_warnings(result)),
        half_forecast=_forecast_from_half(result),
    )


def require_both(result: Fit, free: Fit | None) -> Fit:
    """The fit with what is fitted without knowing R0; identified if both are."""
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
    """The R0 to hold, if any, and what is known of it.

    "given" is exact.  "measured" is an observation with noise, which only the paper's
    protocol holds.  "fitted" is what the points after step 0 say.
    """
    given = settings.initial_reward
    if isinstance(given, int | float) and law.starts_at_r0:
        return {R0: float(given)}, "given"
    if given is not None or curve.r0 is None or not law.known_at_zero:
        return {}, "fitted"
    return {R0: curve.r0} if settings.protocol == "paper" else {}, "measured"


def _require_points(curve: Curve, law: Law, source: Source) -> None:
    """More points than parameters, and more than one value.

    A measured R0 is a point and a parameter.
    """
    num_parameters = 3 + law.has_v - (source != "fitted")
    num_parameters -= law.held_asymptote is not None
    if curve.x.size <= num_parameters:
        remedy = ", lower --from" if curve.num_left_out else ""
        if source == "fitted" and law.starts_at_r0:
            remedy += ", or give --r0 to fit one less"
        missing = num_parameters + 1 - curve.x.size
        enough = curve.x[-1] * (1.0 + missing / (curve.x.size + curve.num_left_out))
        raise TooFewPointsError(
            f"{_count(curve.x.size, 'point')} with {curve.x_name} > 0 cannot fix "
            f"{num_parameters} parameters; at least {num_parameters + 1} are needed: "
            f"{_count(missing, 'evaluation')} more, by about {curve.x_name} = "
            f"{enough:.3g} at the rate so far, or evaluate more often{remedy}",
            missing=missing,
        )
    if np.ptp(curve.y) == 0:
        raise CurveError(
            f"constant curve: {curve.y_name} is {curve.y[0]:g} at all {curve.y.size} "
            "points, so there is no scaling to fit; check --y, or train for longer"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _forecast_from_half(fit: Fit) -> Forecast | None:
    """Fit the points up to half of the last compute, and predict the last point."""
    curve, law, settings = fit.curve, fit.definition, fit.settings
    half = curve.x <= 0.5 * curve.x[-1]
    observed = fit.problem.observes_zero
    num_free = len(fit.problem.free) - observed
    if half.sum() <= num_free or np.ptp(curve.y[half]) == 0:
        return None
    first = curve.part(half)
    problem, _ = make_problem(
        first, law, fit.problem.held, weighted=settings.weighs, observed=observed
    )
    problem, best, _, _ = search_problem(problem, robust=settings.robust)
    mean = mean_curve(problem, best, known=None, thinning=1.0)
    predicted = float(mean.rates(np.log(curve.x[-1:] / first.x[-1]))[0])
    actual = float(curve.y[-1])
    return Forecast(
        fit_until=float(first.x[-1]),
        predicted=predicted,
        actual=actual,
        error=predicted - actual,
    )
