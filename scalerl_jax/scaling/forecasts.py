"""Forecasts: the extrapolation test of the laws, and planning from a fit.

The test fits the first part of a curve and predicts the rest.  Laws are chosen by this
held-out error, never by R^2: every law here that has three parameters bends through the
points it was fitted to.

A plan gives the compute to reach a target, the gain of more, and when to stop.  Every
quantity is computed for all fits that the data accept; its interval is their range, the
profile-likelihood interval.  An open end (None) means that some accepted fit never
reaches the quantity.

One file above 400 lines: both extrapolate past the end of the data.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from scalerl_jax.scaling.fit import keep_from, quick_fit
from scalerl_jax.scaling.laws import LAWS
from scalerl_jax.scaling.obstacles import refuse_copies
from scalerl_jax.scaling.protocol import paper_settings
from scalerl_jax.scaling.records import (
    Array,
    Curve,
    CurveError,
    Interval,
    Record,
    envelope,
)
from scalerl_jax.scaling.result import LAST_POINTS, Fit, Settings
from scalerl_jax.scaling.uncertainty import reach_of_mean

LAST_VALUE = "last_value"
DEFAULT_FRACTIONS = (0.25, 0.33, 0.5)
FARTHEST = 1e6  # times the data: beyond, "never"
SEARCH_POINTS = 600
STEP = 1e-4  # of log x, for derivatives


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction(Record):
    """Errors of one law that was fitted to the first part of the compute, on the rest.

    Errors are predicted minus measured pass rates over the held-out points; None
    where the law could not be fitted, for the `reason` given.
    """

    law: str
    fraction: float  # of the last compute that the fit may see
    fit_until: float  # compute of the last point that was fitted
    num_fitted: int
    num_held_out: int
    mean_absolute_error: float | None = None
    root_mean_square_error: float | None = None
    mean_error: float | None = None  # > 0: too hopeful
    last_predicted: float | None = None  # pass rate at the last evaluation
    last_actual: float
    last_error: float | None = None
    share_in_band: float | None = None  # of held-out points in the prediction band
    identified: bool = False
    reason: str | None = None  # why not identified, or not fitted
    fit: Fit | None = dataclasses.field(repr=False, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extrapolation(Record):
    """The table of predictions and the law that the held-out error chooses."""

    x_name: str
    y_name: str
    fractions: tuple[float, ...]
    laws: tuple[str, ...]  # with "last_value" at the end
    predictions: tuple[Prediction, ...]  # by fraction, then law
    # Fractions to which every law was fitted that was fitted to any: the ranking uses
    # these only, as a smaller part is harder to predict from.
    ranked_on: tuple[float, ...]
    best_law: str | None  # least mean absolute error, averaged over `ranked_on`
    mean_errors: dict[str, float | None]  # that average; None: fitted to no fraction
    beats_last_value: bool  # the best law is better than the last value
    curve: Curve = dataclasses.field(repr=False)

    def get(self, law: str, fraction: float) -> Prediction:
        """Return one prediction of the table."""
        for prediction in self.predictions:
            if (prediction.law, prediction.fraction) == (law, fraction):
                return prediction
        raise ValueError(
            f"no prediction of law {law!r} from fraction {fraction:g}; laws: "
            f"{list(self.laws)}, fractions: {list(self.fractions)}"
        )


def extrapolate_curve(
    curve: Curve,
    *,
    fractions: Sequence[float] = DEFAULT_FRACTIONS,
    laws: Sequence[str] = tuple(LAWS),
    settings: Settings | None = None,
) -> Extrapolation:
    """Fit each law on the first fractions of the compute, and predict the rest.

    Args:
        curve: from `make_curve` or a reader.
        fractions: shares of the last compute; the paper fits on a half.
        laws: names out of `LAWS`.
        settings: of the fits, besides the law.
    """
    settings = settings or Settings()
    for fraction in fractions:
        if not 0 < fraction < 1:
            raise CurveError(
                f"fractions: {fraction:g} is not in (0, 1); give shares of the "
                "compute, such as 0.25 0.33 0.5"
            )
    if settings.protocol == "paper":
        settings = paper_settings(curve, settings)
    used = keep_from(curve, settings.fit_from)
    # 0 and not None, for which the paper's protocol has a cut of its own.
    unsaid = dataclasses.replace(settings, fit_from=0.0)
    predictions = tuple(
        _predict(used, fraction, law, unsaid)
        for fraction in fractions
        for law in (*laws, LAST_VALUE)
    )
    if all(prediction.fit is None for prediction in predictions):
        raise CurveError(
            f"no law can be fitted to {100 * max(fractions):.0f} % of the compute or "
            f"less: {predictions[-2].reason}"
        )
    ranked_on = _fractions_of_all(predictions, fractions, laws)
    errors = {
        law: _mean_error(predictions, law, ranked_on) for law in (*laws, LAST_VALUE)
    }
    rated = {law: error for law, error in errors.items() if error is not None}
    candidates = [law for law in laws if law in rated]
    best = min(candidates, key=rated.__getitem__) if candidates else None
    return Extrapolation(
        x_name=curve.x_name,
        y_name=curve.y_name,
        fractions=tuple(fractions),
        laws=(*laws, LAST_VALUE),
        predictions=predictions,
        ranked_on=ranked_on,
        best_law=best,
        mean_errors=errors,
        beats_last_value=best is not None
        and rated[best] < rated.get(LAST_VALUE, np.inf),
        curve=used,
    )


def _fractions_of_all(
    predictions: Sequence[Prediction], fractions: Sequence[float], laws: Sequence[str]
) -> tuple[float, ...]:
    """Return the fractions to which all laws that fit any were fitted."""
    fitted = {(p.law, p.fraction) for p in predictions if p.fit is not None}
    usable = [law for law in laws if any((law, f) in fitted for f in fractions)]
    return tuple(f for f in fractions if all((law, f) in fitted for law in usable))


def _mean_error(
    predictions: Sequence[Prediction], law: str, fractions: Sequence[float]
) -> float | None:
    """Return the mean absolute error of a law over these fractions, if fitted."""
    found = {p.fraction: p.mean_absolute_error for p in predictions if p.law == law}
    errors = [error for f in fractions if (error := found[f]) is not None]
    return float(np.mean(errors)) if errors else None


def _predict(curve: Curve, fraction: float, law: str, settings: Settings) -> Prediction:
    """Return one cell of the table."""
    seen = curve.x <= fraction * curve.x[-1]
    later, actual = curve.x[~seen], curve.y[~seen]
    found = Prediction(
        law=law,
        fraction=fraction,
        fit_until=float(curve.x[seen][-1]) if seen.any() else 0.0,
        num_fitted=int(seen.sum()),
        num_held_out=later.size,
        last_actual=float(curve.y[-1]),
    )
    if law == LAST_VALUE:
        if not seen.any():
            return found
        predicted = np.full(later.size, curve.y[seen][-LAST_POINTS:].mean())
    else:
        try:
            if not seen.any():
                raise CurveError(f"no point up to {fraction:g} of the compute")
            settings = dataclasses.replace(settings, law=law)
            fit = quick_fit(curve.part(seen), settings)
        except CurveError as failure:
            return dataclasses.replace(found, reason=str(failure))
        predicted = fit.forecast(later)
        low, high = fit.prediction_band(later)
        found = dataclasses.replace(
            found,
            share_in_band=float(((low <= actual) & (actual <= high)).mean()),
            identified=fit.identified,
            reason=fit.reason,
            fit=fit,
        )
    errors = predicted - actual
    return dataclasses.replace(
        found,
        mean_absolute_error=float(np.abs(errors).mean()),
        root_mean_square_error=float(np.sqrt((errors**2).mean())),
        mean_error=float(errors.mean()),
        last_predicted=float(predicted[-1]),
        last_error=float(errors[-1]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledPrediction(Record):
    """Errors of one law from one part of the compute, over the seeds of a recipe.

    The intervals are of the means, Student's t over the seeds: they include the spread
    between runs.  None: fewer than two seeds.
    """

    law: str
    fraction: float
    num_seeds: int  # that the law could be fitted to
    mean_absolute_error: float | None = None
    mean_error: float | None = None  # > 0: too hopeful
    mean_error_interval: Interval | None = None
    last_error: float | None = None
    last_error_interval: Interval | None = None
    share_in_band: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledExtrapolation(Record):
    """The extrapolation tests of several seeds of one recipe."""

    num_seeds: int
    level: float
    predictions: tuple[PooledPrediction, ...]  # by fraction, then law
    warnings: tuple[str, ...] = ()


def pool_extrapolations(
    tests: Sequence[Extrapolation], *, level: float = Settings.level
) -> PooledExtrapolation:
    """Return the mean errors over the seeds of one recipe, with intervals.

        interval = mean +- t(S - 1) * sd / sqrt(S)

    over the S seeds to which a law could be fitted.
    """
    if not tests:
        raise CurveError("no seeds to pool; give at least one test")
    if len({(t.fractions, t.laws, t.x_name, t.y_name) for t in tests}) > 1:
        raise CurveError("seeds to pool must be tests of the same laws, parts, x and y")
    refuse_copies(test.curve for test in tests)
    warnings = ()
    if len(tests) == 1:
        warnings = ("one seed: what seeds change is not measured",)
    return PooledExtrapolation(
        num_seeds=len(tests),
        level=level,
        predictions=tuple(
            _pooled([test.get(law, fraction) for test in tests], level)
            for fraction in tests[0].fractions
            for law in tests[0].laws
        ),
        warnings=warnings,
    )


def _pooled(seeds: Sequence[Prediction], level: float) -> PooledPrediction:
    """Return one cell of the pooled table."""

    def over_seeds(name: str) -> tuple[float | None, Interval | None]:
        values = [v for each in seeds if (v := getattr(each, name)) is not None]
        if not values:
            return None, None
        mean = float(np.mean(values))
        if len(values) == 1:
            return mean, None
        reach = reach_of_mean(np.array(values), level)
        return mean, Interval(mean - reach, mean + reach)

    mean_error, mean_interval = over_seeds("mean_error")
    last_error, last_interval = over_seeds("last_error")
    return PooledPrediction(
        law=seeds[0].law,
        fraction=seeds[0].fraction,
        num_seeds=sum(each.mean_error is not None for each in seeds),
        mean_absolute_error=over_seeds("mean_absolute_error")[0],
        mean_error=mean_error,
        mean_error_interval=mean_interval,
        last_error=last_error,
        last_error_interval=last_interval,
        share_in_band=over_seeds("share_in_band")[0],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate(Record):
    """A planned quantity with its interval; None: never, or without limit."""

    value: float | None
    interval: Interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(Record):
    """Compute and cost to reach a pass rate."""

    pass_rate: float
    compute: Estimate  # in the unit of x, from the start of the run
    further_compute: Estimate  # beyond the data; 0 when already reached
    cost: Estimate | None  # of all the compute; None without a price
    reached_by: float  # share of the accepted fits that reach it at all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """Gains and costs of spending more, by a fit."""

    x_name: str
    y_name: str
    x_last: float
    level: float
    price: float | None  # per unit of x
    identified: bool
    targets: tuple[Target, ...]
    doubled: Estimate  # pass rate gained by doubling the compute
    doubled_cost: float | None  # of that doubling
    marginal_gain: Estimate  # pass rate gained per unit of x at the end of the data
    stop_below: float | None  # the marginal gain that is no longer worth its price
    stop_at: Estimate | None  # compute at which the marginal gain falls below it
    advice: str
    warnings: tuple[str, ...]


def plan(
    fit: Fit,
    *,
    target: float | Sequence[float] | None = None,
    price_per_chip_hour: float | None = None,
    value_of_a_point: float | None = None,
    stop_below: float | None = None,
) -> Plan:
    """Forecast the gain and the cost of more compute, by a fit of any law.

    The stopping rule: train while dR/dx, the pass rate gained per unit of x, is at
    least `stop_below`.  With a price p per unit and a value v of one percentage point
    (0.01 of pass rate), stop_below = 0.01 p / v.

    Args:
        target: pass rate, or several, in [0, 1].
        price_per_chip_hour: what one unit of x costs; x should be chip-hours.
        value_of_a_point: what one percentage point is worth, in the same money.
        stop_below: least gain per unit of x worth having, instead of the two above.

    Raises:
        CurveError: the curve does not climb, or an argument is outside its limits.
    """
    if not fit.climbs:
        raise CurveError(f"there is nothing to plan from: {fit.reason}")
    targets = _checked_targets(target)
    for name, number in (
        ("price_per_chip_hour (--price)", price_per_chip_hour),
        ("value_of_a_point (--point-value)", value_of_a_point),
        ("stop_below (--stop-below)", stop_below),
    ):
        if number is not None and not 0 < number < float("inf"):
            raise CurveError(f"{name} = {number:g}; give a number above 0")
    if stop_below is None and price_per_chip_hour and value_of_a_point:
        stop_below = 0.01 * price_per_chip_hour / value_of_a_point
    theta = np.vstack([fit.theta, fit.accepted])
    end = fit.x_last
    doubling = _doubling(fit, theta)
    marginal = _estimate(marginal_gains(fit, theta, np.array([end]))[:, 0])
    stop_at = None if stop_below is None else _estimate(_stops(fit, theta, stop_below))
    return Plan(
        x_name=fit.x_name,
        y_name=fit.y_name,
        x_last=end,
        level=fit.level,
        price=price_per_chip_hour,
        identified=fit.identified,
        targets=tuple(
            _target(fit, theta, rate, price_per_chip_hour) for rate in targets
        ),
        doubled=doubling,
        doubled_cost=None if price_per_chip_hour is None else price_per_chip_hour * end,
        marginal_gain=marginal,
        stop_below=stop_below,
        stop_at=stop_at,
        advice=_advice(fit, doubling, stop_at),
        warnings=_warnings(fit, price_per_chip_hour),
    )


def _doubling(fit: Fit, theta: Array) -> Estimate:
    """Return the pass rate gained by twice the compute; interval over theta [K, 4].

    It holds the value, too (`Fit.forecast_band`).
    """
    ends = [fit.x_last, 2.0 * fit.x_last]
    value = float(np.diff(fit.forecast(ends))[0])
    gains = np.diff(fit.curves(theta, ends), axis=1)[:, 0]
    return Estimate(value=value, interval=envelope(np.append(gains, value)))


def marginal_gains(fit: Fit, theta: Array, x: Array) -> Array:
    """Return dR/dx at x [n] for the parameter rows theta [K, 4]: [K, n].

    By central differences in log x, whose error is far below that of the fit.
    """
    rise = fit.curves(theta, x * np.exp(STEP)) - fit.curves(theta, x * np.exp(-STEP))
    return rise / (2.0 * STEP * x)


def compute_to_reach(fit: Fit, theta: Array, pass_rate: float) -> Array:
    """Return the least x at which each row of theta [K, 4] reaches a pass rate: [K].

    Infinite where it is not reached within FARTHEST times the data, 0 where it was
    reached before any compute.  Bisection in log x: every law here climbs.
    """
    low = np.full(len(theta), np.log(fit.x_last) - 40.0)
    high = np.full(len(theta), np.log(fit.x_last * FARTHEST))

    never = _row_rates(fit, theta, high) < pass_rate
    already = _row_rates(fit, theta, low) >= pass_rate
    for _ in range(60):
        middle = 0.5 * (low + high)
        reached = _row_rates(fit, theta, middle) >= pass_rate
        high = np.where(reached, middle, high)
        low = np.where(reached, low, middle)
    return np.where(never, np.inf, np.where(already, 0.0, np.exp(high)))


def _row_rates(fit: Fit, theta: Array, log_x: Array) -> Array:
    """Return the pass rate of each row of theta [K, 4] at its own x: log_x [K]."""
    t = log_x - np.log(fit.x_last)
    return fit.definition.rates(theta, t[:, None])[:, 0]


def _stops(fit: Fit, theta: Array, stop_below: float) -> Array:
    """Return the last x, from the start of the data on, with dR/dx >= stop_below: [K].

    It is the start of the data where dR/dx is lower everywhere, and infinite where
    dR/dx does not fall below within FARTHEST times the data.
    """
    x = np.geomspace(fit.curve.x[0], fit.x_last * FARTHEST, SEARCH_POINTS)
    worth = marginal_gains(fit, theta, x) >= stop_below
    last = SEARCH_POINTS - 1 - np.argmax(worth[:, ::-1], axis=1)
    low = np.log(x[last])
    high = np.log(x[np.minimum(last + 1, SEARCH_POINTS - 1)])
    for _ in range(30):
        middle = 0.5 * (low + high)
        rise = _row_rates(fit, theta, middle + STEP)
        rise -= _row_rates(fit, theta, middle - STEP)
        gains = rise / (2.0 * STEP * np.exp(middle))
        low = np.where(gains >= stop_below, middle, low)
        high = np.where(gains >= stop_below, high, middle)
    found = np.where(worth.any(axis=1), np.exp(low), x[0])
    return np.where(worth[:, -1], np.inf, found)


def _estimate(values: Array) -> Estimate:
    """Return the best fit's value (the first) and the range of all."""
    best = float(values[0])
    return Estimate(
        value=best if np.isfinite(best) else None, interval=envelope(values)
    )


def _target(fit: Fit, theta: Array, pass_rate: float, price: float | None) -> Target:
    """Forecast the compute and the cost of reaching one target."""
    compute = compute_to_reach(fit, theta, pass_rate)
    return Target(
        pass_rate=pass_rate,
        compute=_estimate(compute),
        further_compute=_estimate(np.maximum(compute - fit.x_last, 0.0)),
        cost=None if price is None else _estimate(price * compute),
        reached_by=float(np.isfinite(compute).mean()),
    )


def _checked_targets(target: float | Sequence[float] | None) -> list[float]:
    """Return the targets as a list, each in (0, 1)."""
    if target is None:
        return []
    targets = np.atleast_1d(np.asarray(target, np.float64)).tolist()
    for rate in targets:
        if not 0 < rate < 1:
            raise CurveError(
                f"--target = {rate:g} is outside (0, 1), where pass rates lie; divide "
                "percent by 100"
            )
    return targets


def _advice(fit: Fit, doubled: Estimate, stop_at: Estimate | None) -> str:
    """Return the stopping rule's result, or the gain of doubling without a rule."""
    low, high = doubled.interval.low or 0.0, doubled.interval.high or 0.0
    gain = f"doubling the compute gains {doubled.value:.4f} [{low:.4f}, {high:.4f}]"
    if stop_at is None:
        return gain
    if stop_at.interval.high is not None and stop_at.interval.high <= fit.x_last:
        return (
            f"stop: the marginal gain is below its price by all accepted fits; {gain}"
        )
    if stop_at.interval.low is None or stop_at.interval.low > fit.x_last:
        return (
            f"go on: the marginal gain is worth its price by all accepted fits; {gain}"
        )
    return f"undecided: the accepted fits disagree on whether to stop; {gain}"


def _warnings(fit: Fit, price: float | None) -> tuple[str, ...]:
    """Return warnings on the limits of the plan."""
    found = []
    if not fit.identified:
        found.append(
            f"A is not identified, so targets may be out of reach: {fit.reason}"
        )
    if price is not None and "hour" not in fit.x_name:
        found.append(
            f"the price is per unit of {fit.x_name}, which does not seem to be hours"
        )
    found.append(
        "forecasts beyond 2 to 3 times the data are further than the paper has shown"
    )
    return tuple(found)
