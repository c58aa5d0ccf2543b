"""Planning from a fit: compute to reach a target, the gain of more, when to stop.

Every quantity is computed for all fits that the data accept; its interval is their
range, the profile-likelihood interval.  An open end (None) says that some accepted
fit never gets there.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from scalerl_jax.scaling.curves import CurveError
from scalerl_jax.scaling.laws import Array
from scalerl_jax.scaling.records import Interval, Record, envelope
from scalerl_jax.scaling.result import Fit

FARTHEST = 1e6  # times the data: beyond, "never"
SEARCH_POINTS = 600
STEP = 1e-4  # of log x, for derivatives


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate(Record):
    """A planned quantity with its interval; None: never, or without limit."""

    value: float | None
    interval: Interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(Record):
    """What it takes to reach a pass rate."""

    pass_rate: float
    compute: Estimate  # in the unit of x, from the start of the run
    further_compute: Estimate  # beyond the data; 0 when already reached
    cost: Estimate | None  # of all the compute; None without a price
    reached_by: float  # share of the accepted fits that reach it at all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """What a fit says about spending more."""

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
    """What more compute would bring, by a fit of any law.

    The stopping rule: train while dR/dx, the pass rate gained per unit of x, is at
    least `stop_below`.  With a price p per unit and a value v of one percentage point
    (0.01 of pass rate), stop_below = 0.01 p / v.

    Args:
        fit: of one run.
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
    """Pass rate gained by twice the compute: of the forecast, over theta [K, 4]."""
    ends = [fit.x_last, 2.0 * fit.x_last]
    before, after = fit.forecast(ends)
    gains = np.diff(fit.curves(theta, ends), axis=1)[:, 0]
    return Estimate(value=float(after - before), interval=envelope(gains))


def marginal_gains(fit: Fit, theta: Array, x: Array) -> Array:
    """dR/dx at x [n] for the parameter rows theta [K, 4]: [K, n].

    By central differences in log x, whose error is far below that of the fit.
    """
    rise = fit.curves(theta, x * np.exp(STEP)) - fit.curves(theta, x * np.exp(-STEP))
    return rise / (2.0 * STEP * x)


def compute_to_reach(fit: Fit, theta: Array, pass_rate: float) -> Array:
    """Least compute x at which each row of theta [K, 4] reaches a pass rate: [K].

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
    """Pass rate of each row of theta [K, 4] at its own x: log_x [K] -> [K]."""
    r0, a, u, v = theta.T
    share = fit.definition.share(log_x - np.log(fit.x_last), u, v)
    return r0 + (a - r0) * share


def _stops(fit: Fit, theta: Array, stop_below: float) -> Array:
    """Last x, from the start of the data on, with dR/dx >= stop_below: [K].

    The start of the data where it is lower everywhere, infinite where it never
    falls below within FARTHEST times the data.
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
    """The best fit's value (the first) and the range of all."""
    best = float(values[0])
    return Estimate(
        value=best if np.isfinite(best) else None, interval=envelope(values)
    )


def _target(fit: Fit, theta: Array, pass_rate: float, price: float | None) -> Target:
    """What one target takes."""
    compute = compute_to_reach(fit, theta, pass_rate)
    return Target(
        pass_rate=pass_rate,
        compute=_estimate(compute),
        further_compute=_estimate(np.maximum(compute - fit.x_last, 0.0)),
        cost=None if price is None else _estimate(price * compute),
        reached_by=float(np.isfinite(compute).mean()),
    )


def _checked_targets(target: float | Sequence[float] | None) -> list[float]:
    """The targets as a list, each in (0, 1)."""
    if target is None:
        return []
    targets = [target] if isinstance(target, int | float) else list(target)
    for rate in targets:
        if not 0 < rate < 1:
            raise CurveError(
                f"--target = {rate:g} is outside (0, 1), where pass rates lie; divide "
                "percent by 100"
            )
    return [float(rate) for rate in targets]


def _advice(fit: Fit, doubled: Estimate, stop_at: Estimate | None) -> str:
    """The stopping rule in words; without a threshold, what doubling brings."""
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
    """What limits the plan."""
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
