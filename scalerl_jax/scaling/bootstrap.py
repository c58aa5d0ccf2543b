"""Bootstrap: intervals from refits of resampled data, and the joint (A, B) region.

Residuals are resampled in moving blocks, which keeps the correlation of neighbouring
evaluations; where pass rates per prompt exist, seeds, prompts and samples are
resampled instead.  All refits of one bootstrap descend together.
"""

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike

from scalerl_jax.scaling.bins import bin_rates
from scalerl_jax.scaling.fit import fit_curve
from scalerl_jax.scaling.identifiability import significant_correlation
from scalerl_jax.scaling.records import (
    Array,
    Bools,
    CurveError,
    Interval,
    Record,
    make_curve,
    quantile_interval,
)
from scalerl_jax.scaling.result import Fit, Settings
from scalerl_jax.scaling.search import A, minimise_each
from scalerl_jax.scaling.uncertainty import joint_region, region_quantile

AT_LIMIT = 1e-6  # an A this close to 1 was stopped by that limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bootstrap(Record):
    """Intervals of a fit's parameters over refits of resampled data.

    An interval's high is None where the refits run into A = 1.
    """

    method: str  # "moving blocks", "prompts", "prompts, samples", "seeds, prompts", ..
    law: str
    level: float
    num_resamples: int
    num_failed: int  # refits that did not converge; they are left out
    block_length: int | None  # evaluations in a block
    seed: int
    intervals: dict[str, Interval]
    fit: Fit = dataclasses.field(repr=False)
    theta: Array = dataclasses.field(repr=False)  # [K, 4] as Fit.theta


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region(Record):
    """Region of two parameters together, with the probability `level`."""

    names: tuple[str, str]
    level: float
    bounded: bool  # False: it reaches a limit of the search (A = 1, say)
    points: list[tuple[float, float]]  # corners of its edge, in order


def bootstrap(
    fit: Fit,
    *,
    num_resamples: int = 1000,
    block_length: int | None = None,
    seed: int = 0,
) -> Bootstrap:
    """Bootstrap a fit by moving blocks of its residuals.

        y*[i] = R(x[i]) + sqrt(n / (n - p)) (e*[i] - mean e) / sqrt(weight[i])

    with e* put together from blocks of neighbouring scaled residuals.  Künsch,
    Annals of Statistics 17 (1989), section 2.

    Args:
        fit: from `scalerl_jax.scaling.fit`.
        block_length: evaluations in a block; by default from the residuals'
            correlation (`default_block_length`), 1 when they are independent.
    """
    n = fit.num_points
    length = block_length or default_block_length(fit.autocorrelation, n)
    if not 1 <= length <= n:
        raise CurveError(
            f"block_length = {length}; give a number of evaluations from 1 to {n}"
        )
    y = draw_residual_curves(fit, num_resamples, length, seed=seed)
    return summarise(fit, refit(fit, y), "moving blocks", seed=seed, length=length)


def draw_residual_curves(
    fit: Fit, num_resamples: int, block_length: int | None = None, *, seed: int
) -> Array:
    """Draw curves of a fit with its residuals resampled in moving blocks.

    [K, n] with the points of `fit.problem.y`: step 0 first where it is an observation.
    """
    length = block_length or default_block_length(fit.autocorrelation, fit.num_points)
    problem = fit.problem.points
    n, generator = problem.t.size, np.random.default_rng(seed)
    z = problem.scaled_residuals(fit.theta[None])[0]
    predicted = problem.y[0] - z / np.sqrt(problem.weights)
    z = (z - z.mean()) * math.sqrt(n / (n - len(problem.free)))
    starts = generator.integers(0, n - length + 1, (num_resamples, -(-n // length)))
    places = (starts[:, :, None] + np.arange(length)).reshape(num_resamples, -1)[:, :n]
    drawn = predicted + z[places] / np.sqrt(problem.weights)
    return bin_rates(fit.problem, drawn)


def default_block_length(autocorrelation: float, num_points: int) -> int:
    """Return the block length for the variance of a mean of AR(1) noise, <= n / 4.

        length = (sqrt(6) rho / (1 - rho^2))^(2/3) n^(1/3)

    Carlstein, Annals of Statistics 14 (1986), with 3/2 for overlapping blocks.
    A correlation that independent noise can show counts as 0.
    """
    rho = min(autocorrelation, 0.95)
    if rho < significant_correlation(num_points):
        return 1
    length = (math.sqrt(6.0) * rho / (1.0 - rho**2)) ** (2 / 3) * num_points ** (1 / 3)
    return max(1, min(math.ceil(length), num_points // 4))


def bootstrap_prompts(
    x: ArrayLike,
    rates: ArrayLike,
    *,
    num_samples: int | None = None,
    settings: Settings | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Bootstrap:
    """Bootstrap over seeds, the evaluation's prompts, and samples, nested.

    Seeds are drawn with replacement; the prompts too, the same ones at every
    evaluation and seed, as all are evaluated on one set; the samples of each prompt
    are drawn again as Binomial(num_samples, rate).  The fit is of the mean curve.

    Args:
        x: [n] compute of the evaluations, from 0 on where R0 is observed.
        rates: [n, P] pass rate of each prompt, or [S, n, P] over S seeds.
        num_samples: completions per prompt behind a rate; without it samples are
            not redrawn.
    """
    outcomes = check_rates(x, rates)
    if settings is not None and settings.weighs:
        raise CurveError(
            "a bootstrap over prompts does not weigh the evaluations: leave `weighted` "
            "and `errors_known` of the settings out"
        )
    curve = make_curve(x, outcomes.mean(axis=(0, 2)))
    result = fit_curve(curve, settings)
    fitted = np.isin(np.asarray(x, np.float64), result.curve.x)
    fitted[0] |= result.problem.observes_zero
    outcomes = outcomes[:, fitted]
    num_seeds, num_points, num_prompts = outcomes.shape
    generator, y = np.random.default_rng(seed), np.empty((num_resamples, num_points))
    for place in range(num_resamples):
        seeds = generator.integers(0, num_seeds, num_seeds)
        prompts = generator.integers(0, num_prompts, num_prompts)
        drawn = outcomes[seeds][:, :, prompts]
        if num_samples:
            drawn = generator.binomial(num_samples, drawn) / num_samples
        y[place] = drawn.mean(axis=(0, 2))
    method = "seeds, prompts" if len(outcomes) > 1 else "prompts"
    method += ", samples" if num_samples else ""
    y = bin_rates(result.problem, y)
    return summarise(result, refit(result, y), method, seed=seed)


def fitted_rates(result: Fit) -> Array | None:
    """Return pass rates per prompt [n, P] at a fit's points, or None if unknown.

    Step 0 is included if the fit observes it.
    """
    curve = result.whole_curve
    if curve.prompt_rates is None:
        return None
    rates = curve.prompt_rates[np.isin(curve.x, result.curve.x)]
    if not result.problem.observes_zero:
        return rates
    assert curve.r0_prompt_rates is not None, "evaluations have them all or none"
    return np.vstack([curve.r0_prompt_rates, rates])


def check_rates(x: ArrayLike, rates: ArrayLike) -> Array:
    """Return pass rates per prompt as [S, n, P], checked against x [n]."""
    outcomes = np.asarray(rates, np.float64)
    outcomes = outcomes[None] if outcomes.ndim == 2 else outcomes
    if outcomes.ndim != 3 or outcomes.shape[1] != np.size(x):
        raise CurveError(
            f"rates has shape {np.shape(rates)} for {np.size(x)} evaluations; give "
            "[evaluations, prompts] or [seeds, evaluations, prompts]"
        )
    if not np.all((outcomes >= 0) & (outcomes <= 1)):
        raise CurveError(
            "rates has values that are not in [0, 1]; give the share of right "
            "completions of each prompt"
        )
    return outcomes


def refit(fit: Fit, y: Array) -> tuple[Array, Bools]:
    """Refit curves y [K, n] with the problem of `fit`.

    Returns:
        theta [K, 4], and which refits converged [K].
    """
    problem = dataclasses.replace(fit.problem, y=y)
    theta, _, ended = minimise_each(problem, fit.theta)
    return theta, ended


def summarise(
    fit: Fit,
    refits: tuple[Array, Bools],
    method: str,
    *,
    seed: int,
    length: int | None = None,
) -> Bootstrap:
    """Return percentile intervals of refits."""
    theta, ended = refits
    kept = theta[ended]
    values = fit.public(kept)
    if fit.definition.held_asymptote is None and A not in fit.problem.held:
        capped = values["A"] >= 1.0 - AT_LIMIT
        values["A"] = np.where(capped, np.inf, values["A"])
    intervals = {
        name: quantile_interval(values[name], fit.level)
        for name, parameter in fit.parameters.items()
        if parameter.interval is not None
    }
    return Bootstrap(
        method=method,
        law=fit.law,
        level=fit.level,
        num_resamples=len(theta),
        num_failed=int((~ended).sum()),
        block_length=length,
        seed=seed,
        intervals=intervals,
        fit=fit,
        theta=kept,
    )


def region(
    fit: Fit, names: tuple[str, str] = ("A", "B"), *, level: float | None = None
) -> Region:
    """Find the joint profile-likelihood region of two fitted parameters.

    The objective may exceed its minimum by 2 F(level; 2, n - p) s^2, with all other
    parameters fitted again: wider in each direction than the single intervals, and
    slanted where one parameter compensates for the other.
    """
    level = level or fit.level
    columns = {kind.name: kind.column for kind in fit.definition.kinds}
    chosen = [columns.get(name) for name in names]
    if any(column is None or column not in fit.problem.free for column in chosen):
        raise CurveError(
            f"names = {names}; choose two fitted parameters of {list(columns)}"
        )
    first, second = (column for column in chosen if column is not None)
    corners, bounded = joint_region(
        fit.problem,
        fit.theta,
        (first, second),
        cost=fit.cost,
        excess=region_quantile(level, fit.degrees) * fit.unit_growth,
    )
    theta = np.tile(fit.theta, (len(corners), 1))
    theta[:, [first, second]] = corners
    values = fit.public(theta)
    points = list(zip(*(values[name].tolist() for name in names), strict=True))
    return Region(names=names, level=level, bounded=bounded, points=points)
