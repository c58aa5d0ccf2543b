"""One fit of one curve: weights, loss, search, intervals, verdict.

`fit.py` decides what to fit and what to hold; this module makes one such fit.
"""

import dataclasses
from typing import Any

import numpy as np

from scalerl_jax.scaling.bins import bin_points
from scalerl_jax.scaling.identifiability import (
    MAD_TO_SIGMA,
    FitVerdict,
    climb_p_value,
    durbin_watson,
    identify,
    significant_correlation,
)
from scalerl_jax.scaling.laws import LAWS, Law
from scalerl_jax.scaling.records import (
    OPEN,
    Array,
    Curve,
    CurveError,
    Interval,
    Parameter,
    Source,
    envelope,
    r_squared,
)
from scalerl_jax.scaling.result import Fit, Settings
from scalerl_jax.scaling.search import (
    LOG_ZERO,
    R0,
    SHAPE_U,
    SHAPE_V,
    A,
    Grid,
    Problem,
    minimise,
)
from scalerl_jax.scaling.uncertainty import SIGMA_FLOOR, Noise, profile, surface

# Huber's loss is linear past this many standard deviations: 95 % efficient on
# normal noise (Huber and Ronchetti, Robust Statistics, 2nd ed., section 4.5).
HUBER_TUNING = 1.345
# Known errors are scaled up if chance explains the misfit with less probability.
OVERDISPERSED = 0.01
LARGEST_CORRELATION = 0.9
SCATTER = (
    "the points scatter by {:.4f}, more than their standard errors (about {:.4f}) "
    "explain: the intervals use the scatter"
)
NOT_CONVERGED = "the search did not converge: the numbers are those at which it stopped"


def make_problem(
    curve: Curve,
    law: Law,
    held: dict[int, float],
    *,
    weighted: bool,
    observed: bool = False,
) -> tuple[Problem, float]:
    """Return the least-squares problem, and sigma of a point of weight 1 by curve.y_se.

    Weights are 1 / y_se^2, scaled to mean 1; all are 1 without y_se or `weighted`.
    With `observed`, step 0 is the first point (`start_weight`).
    """
    weights, known = np.ones(curve.x.size), float("nan")
    if weighted and curve.y_se is not None:
        precision = 1.0 / usable_errors(curve) ** 2
        weights, known = precision / precision.mean(), precision.mean() ** -0.5
    t, y = np.log(curve.x / curve.x[-1]), curve.y
    if observed:
        assert curve.r0 is not None, (
            "`initial_reward` observes step 0 only if there is one"
        )
        t, y = np.append(LOG_ZERO, t), np.append(curve.r0, y)
        weights = np.append(start_weight(curve, known), weights)
    return Problem(law=law, t=t, y=y[None], weights=weights, held=held), known


def start_weight(curve: Curve, known: float) -> float:
    """Return the weight of step 0, the observation of R0, relative to an average point.

        weight = typical variance of a point / variance of step 0

    The variances come from the standard errors.  Only their ratio counts, as they may
    include what moves all points alike, such as the choice of prompts.  Without
    standard errors step 0 is as noisy as a point.

    Args:
        curve: with step 0.
        known: sigma of a point of weight 1, NaN if the points are unweighted.
    """
    start = curve.r0_se
    if start is None or start == 0.0 or curve.y_se is None:
        return float(curve.r0_evaluations)
    if not 0.0 < start < np.inf:
        raise CurveError(
            f"step 0: the standard error {start:g} is not a number >= 0; mend it"
        )
    usable = curve.y_se[np.isfinite(curve.y_se) & (curve.y_se > 0)]
    if np.isfinite(known):
        return (known / start) ** 2
    if not usable.size:
        return float(curve.r0_evaluations)
    return float((usable**2).mean()) / start**2


def usable_errors(curve: Curve) -> Array:
    """Return standard errors for weights: zeros replaced; CurveError if not finite.

    A point with all samples right, or all wrong, has a binomial error of 0, which would
    give it infinite weight: it gets the median error of the others.
    """
    errors = np.asarray(curve.y_se, np.float64)
    bad = ~np.isfinite(errors) | (errors < 0)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise CurveError(
            f"point {i + 1}: the standard error {errors[i]:g} is not a number >= 0; "
            "mend it, or fit without standard errors"
        )
    if not (errors > 0).any():
        raise CurveError("every standard error is 0; fit without standard errors")
    return np.where(errors > 0, errors, np.median(errors[errors > 0]))


def search_problem(
    problem: Problem, robust: bool
) -> tuple[Problem, Array, float, bool]:
    """Find the best fit; with `robust`, of Huber's loss at a scale taken from the fit.

    Returns:
        The problem with its loss, binned if it is long, theta [4], the objective, and
        whether it converged.
    """
    problem = problem if robust else bin_points(problem)
    grid = Grid(problem)
    theta, cost, ended = minimise(problem, grid)
    if problem.whole is not None:
        total = float(problem.whole.cost(theta[None])[0])
        problem, cost = dataclasses.replace(problem, within=total - cost), total
    if not robust:
        return problem, theta, cost, ended
    degrees = problem.t.size - len(problem.free)
    for _ in range(2):  # the second scale is not inflated by the outliers
        z = problem.scaled_residuals(theta[None])[0]
        scale = MAD_TO_SIGMA * float(np.median(np.abs(z)))
        scale = max(scale * np.sqrt(z.size / degrees), 1e-6)
        problem = dataclasses.replace(problem, huber=HUBER_TUNING * scale)
        theta, cost, ended = minimise(problem, grid)
    return problem, theta, cost, ended


def noise_of(
    problem: Problem, best: Array, known: float | None
) -> tuple[float, float, int | None]:
    """Return the noise of the points, and the growth of the objective that it allows.

        variance = sum_i psi_i^2 / (n - p)
        growth = variance / mean_i psi'_i

    with psi the derivative of half the loss; for plain squares both are the usual
    s^2, and with Huber's loss growth is the factor of the likelihood-ratio type test
    (Huber and Ronchetti, Robust Statistics, 2nd ed., section 13.6).  At least
    SIGMA_FLOOR^2.

    A fit is acceptable if its objective exceeds the best one's by at most q^2 times
    the growth, with q Student's two-sided quantile at n - p degrees of freedom: the
    F(1, n - p) test of one parameter, which is wider than the chi-squared one on few
    points.  When the errors are known, they give the variance and q is the normal's,
    unless the scatter is larger than chance explains.

    Returns:
        Growth of the objective for one sigma, the noise sigma of a point of weight 1,
        degrees of freedom (None when the errors are known).
    """
    psi = z = problem.points.scaled_residuals(best[None])[0]
    spare, inside = z.size - len(problem.free), 1.0
    if problem.huber is not None:
        inside = max(float(np.mean(np.abs(z) <= problem.huber)), 1.0 / z.size)
        psi = np.clip(z, -problem.huber, problem.huber)
    variance = max(float((psi**2).sum()) / spare, SIGMA_FLOOR**2)
    growth, trusted = variance / inside, False
    if known is not None:
        from scipy.special import chdtri

        trusted = variance * spare <= float(chdtri(spare, OVERDISPERSED)) * known**2
        if trusted:
            variance = growth = known**2
    if variance > (2.0 * SIGMA_FLOOR) ** 2:  # below, residuals are rounding errors
        growth *= correlation_growth(autocorrelation(z), z.size, z.size - spare)
    return growth, float(np.sqrt(variance)), None if trusted else spare


def estimate(
    curve: Curve,
    settings: Settings,
    held: dict[int, float],
    source: Source,
    *,
    selected: bool = True,
) -> Fit:
    """Fit once, with intervals and the verdict that they give.

    Args:
        settings: law, loss, level and whether the errors are known.
        held: levels that are not fitted, by column of theta.
        source: of R0; if it is "measured" and not held, step 0 is an observation of it.
        selected: call A identified only by a test strict enough that the intervals of
            identified A cover (`selected_quantile`); False: a limit below 1 is enough.
    """
    law, observed = LAWS[settings.law], source == "measured" and R0 not in held
    problem, known = make_problem(
        curve, law, held, weighted=settings.weighs, observed=observed
    )
    problem, best, cost, converged = search_problem(problem, robust=settings.robust)
    trusted = known if settings.errors_known else None
    unit_growth, sigma, degrees = noise_of(problem, best, trusted)
    noise = Noise(unit_growth, degrees, settings.level)
    profiles = profile(problem, best, cost=cost, noise=noise, selected=selected)
    rays = surface(problem, best, cost=cost, excess=noise.excess)
    accepted = np.vstack([best, profiles.inside, rays])
    p_value = climb_chance(curve, settings, law)
    verdict = identify(curve, law, best, profiles, noise.quantile, p_value=p_value)
    scattered = settings.errors_known and degrees is not None
    return Fit(
        **_subject(curve, law),
        **_quality(curve, problem, best),
        level=settings.level,
        parameters=name_parameters(
            curve, law, accepted, profiles.intervals, verdict, source
        ),
        converged=converged,
        climbs=verdict.climbs,
        flat=verdict.flat,
        climb_p_value=p_value,
        identified=converged and verdict.reason is None,
        bounded=converged and verdict.bounded,
        reason=verdict.reason or (None if converged else NOT_CONVERGED),
        sigma=sigma,
        warnings=verdict.warnings + scattered * (SCATTER.format(sigma, known),),
        settings=settings,
        problem=problem,
        theta=best,
        cost=cost,
        unit_growth=unit_growth,
        degrees=degrees,
        accepted=accepted,
    )


def _subject(curve: Curve, law: Law) -> dict[str, Any]:
    """Return the fields of a fit that repeat its curve and law."""
    return {
        "law": law.name,
        "formula": law.formula,
        "protocol": "default",
        "x_name": curve.x_name,
        "y_name": curve.y_name,
        "x_last": float(curve.x[-1]),
        "num_points": curve.x.size,
        "num_left_out": curve.num_left_out,
        "curve": curve,
        "whole_curve": curve,
    }


def _quality(curve: Curve, problem: Problem, best: Array) -> dict[str, Any]:
    """Return measures of the fit to points after step 0, and of their correlation."""
    t = np.log(curve.x / curve.x[-1])
    share = problem.law.share(t, best[SHAPE_U], best[SHAPE_V])
    residuals = curve.y - best[R0] - (best[A] - best[R0]) * share
    return {
        "r_squared": r_squared(curve.y, residuals),
        "autocorrelation": autocorrelation(residuals),
        "residual_p_value": durbin_watson(problem, best),
    }


def climb_chance(curve: Curve, settings: Settings, law: Law) -> float:
    """Return the curve's `climb_p_value`, from step 0 on or from a given R0."""
    given = settings.initial_reward
    known = float(given) if isinstance(given, int | float) else None
    observed = known is None and curve.r0 is not None
    problem, _ = make_problem(
        curve, law, {}, weighted=settings.weighs, observed=observed
    )
    return climb_p_value(problem.y[0], problem.weights, known)


def name_parameters(
    curve: Curve,
    law: Law,
    theta: Array,
    intervals: dict[int, Interval],
    verdict: FitVerdict,
    r0_source: Source,
) -> dict[str, Parameter]:
    """Return the law's parameters; theta is the best row, then the accepted ones."""
    log_x_last = float(np.log(curve.x[-1]))
    values = law.values(theta, log_x_last)
    parameters = {}
    for place, kind in enumerate(law.kinds):
        source: Source = r0_source if kind.column == R0 else "fitted"
        if kind.column in (R0, A) and kind.column not in intervals:
            source = source if kind.column == R0 else "held"
            interval = None
        elif not verdict.climbs:
            interval = OPEN
        elif kind.column == A:
            interval = verdict.asymptote_interval
        elif kind.column is None:
            interval = envelope(values[:, place])
        else:
            ends = []
            for end in (intervals[kind.column].low, intervals[kind.column].high):
                moved = theta[:1].copy()
                moved[0, kind.column] = np.nan if end is None else end
                value = float(law.values(moved, log_x_last)[0, place])
                ends.append(None if end is None else value)
            interval = Interval(*ends)
        parameters[kind.name] = Parameter(
            name=kind.name,
            meaning=kind.meaning,
            unit=kind.unit.replace("{x}", curve.x_name),
            value=float(values[0, place]),
            interval=interval,
            source=source,
        )
    return parameters


def autocorrelation(residuals: Array) -> float:
    """Return the correlation of neighbouring residuals, assuming mean 0."""
    total = float((residuals**2).sum())
    return float((residuals[1:] * residuals[:-1]).sum()) / total if total else 0.0


def correlation_growth(rho: float, num_points: int, num_fitted: int) -> float:
    """Return the factor by which correlated noise widens variances: n / effective n.

        (1 + r) / (1 - r),  r = rho + (p (1 + rho) + 2 rho) / n

    the factor of a mean of AR(1) noise.  A fit of p parameters absorbs slow noise into
    its curve, so residuals correlate less than the noise does; for one parameter, a
    mean, this is the correction of Marriott and Pope (Biometrika 41, 1954).  1 unless
    rho + p / n is beyond what independent noise shows (`significant_correlation`).
    """
    if rho + num_fitted / num_points <= significant_correlation(num_points):
        return 1.0
    lost = (num_fitted * (1.0 + rho) + 2.0 * rho) / num_points
    corrected = min(rho + lost, LARGEST_CORRELATION)
    return (1.0 + corrected) / (1.0 - corrected)
