"""Several seeds of one recipe: their spread, and one fit of all of them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from scalerl_jax.scaling.curves import Curve, CurveError
from scalerl_jax.scaling.fit import fit_alone
from scalerl_jax.scaling.records import Interval, Record
from scalerl_jax.scaling.result import Fit
from scalerl_jax.scaling.uncertainty import student_quantile


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledParameter(Record):
    """One parameter over seeds; no mean of what a seed does not fix."""

    name: str
    values: list[float]  # by seed
    mean: float | None
    standard_deviation: float | None  # between seeds; None for one seed
    interval: Interval  # of the mean, Student's t over the seeds
    largest_deviation: float | None  # from the mean; the paper states 0.015 for A
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
    """Mean and spread of one parameter; of its logarithm unless it is a pass rate."""
    values = np.array([fit.value(name) for fit in fits])
    unfixed = sum(not _fixes(fit, name) for fit in fits)
    if unfixed:
        return PooledParameter(
            name=name,
            values=values.tolist(),
            mean=None,
            standard_deviation=None,
            interval=Interval(None, None),
            largest_deviation=None,
            reason=f"not fixed by {unfixed} of {len(fits)} seeds",
        )
    is_rate = fits[0].parameters[name].unit == "pass rate"
    logarithmic = not is_rate and np.all(values > 0)
    scale = np.log(values) if logarithmic else values
    back = np.exp if logarithmic else float
    mean = float(scale.mean())
    interval, deviation = Interval(None, None), None
    if len(values) > 1:
        deviation = float(values.std(ddof=1))
        error = float(scale.std(ddof=1)) / np.sqrt(len(values))
        reach = student_quantile(level, len(values) - 1) * error
        ends = back(mean - reach), back(mean + reach)
        limits = (0.0, 1.0) if is_rate else (-np.inf, np.inf)
        interval = Interval(*(float(np.clip(end, *limits)) for end in ends))
    return PooledParameter(
        name=name,
        values=values.tolist(),
        mean=float(back(mean)),
        standard_deviation=deviation,
        interval=interval,
        largest_deviation=float(np.abs(values - back(mean)).max()),
    )


def _fixes(fit: Fit, name: str) -> bool:
    """Whether a seed's own interval of a parameter has both limits."""
    interval = fit.interval(name)
    known = fit.climbs and interval.low is not None and interval.high is not None
    return known and (name != "A" or fit.identified)


def fit_together(fits: Sequence[Fit]) -> Fit:
    """One fit of the points of all seeds, each counting alike.

    R0 is the mean of those given; else it is observed once by each seed that has a
    step 0, if all have one.
    """
    settings = fits[0].settings
    given = [fit.settings.initial_reward for fit in fits]
    known = [value for value in given if isinstance(value, int | float)]
    if known:
        settings = dataclasses.replace(settings, initial_reward=float(np.mean(known)))
    return fit_alone(pool_curves([fit.curve for fit in fits]), settings)


def pool_curves(curves: Sequence[Curve]) -> Curve:
    """The points of all curves, in order of compute, and the mean of their R0."""
    x = np.concatenate([curve.x for curve in curves])
    order = np.argsort(x, kind="stable")
    errors = [curve.y_se for curve in curves if curve.y_se is not None]
    starts = [curve.r0 for curve in curves if curve.r0 is not None]
    start_errors = [curve.r0_se for curve in curves if curve.r0_se is not None]
    count = len(curves)
    return dataclasses.replace(
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
