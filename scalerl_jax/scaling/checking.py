"""A run held against its own forecast: has it left the band that it promised?

The forecast is the paper's: the points up to half of the present compute foretell
the rest.  It is made again as the run goes on, so a slow departure shows while it is
in the second half; an alarm that was given stays given (`watch.py`, `live.py`).
"""

import dataclasses
import math

import numpy as np

from scalerl_jax.scaling.curves import Curve, CurveError
from scalerl_jax.scaling.falls import find_fall
from scalerl_jax.scaling.fit import fit_curve
from scalerl_jax.scaling.records import Interval, Record
from scalerl_jax.scaling.result import Fit

DEFAULT_PATIENCE = 3
# All points are held against one curve, so one that lies off puts many outside: the
# band, and not the number of points in a row, keeps false alarms rare.  60 simulated
# runs that keep to the law (noise 0.008) gave one in 480 looks; with 90 % bands, and
# without asking for a bounded A, 8 in 100 looks.
DEFAULT_ALARM_LEVEL = 0.99
SPARE_POINTS = 2  # more than parameters that a forecast is made from
# A fall is an alarm from this many evaluations on: an earlier one may be the start of
# a run, before it has learned anything.
FEWEST_FOR_A_FALL = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(Record):
    """One evaluation against what earlier ones foretold."""

    x: float
    actual: float  # pass rate
    predicted: float  # pass rate
    band: Interval  # of one evaluation: the curve's uncertainty and the noise
    side: int  # 1 above the band, -1 below it, 0 inside


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status(Record):
    """What is known of a run that is under way."""

    name: str
    x_name: str
    y_name: str
    x_last: float
    y_last: float
    num_points: int
    last_step: int | None
    level: float  # of the intervals and the forecast's band
    alarm_level: float  # of the bands in `checks`
    waiting: str | None  # why there is no fit yet
    fit: Fit | None = None  # of all points so far
    horizon: float | None = None  # compute that is forecast
    forecast: float | None = None  # pass rate there
    forecast_band: Interval | None = None  # of the curve there
    fitted_until: float | None = None  # compute up to which `checks` did the fitting
    holds: bool = False  # that fit bounded A, so leaving its band is an alarm
    checks: tuple[Check, ...] = ()
    alarm: str | None = None
    falling: bool = False  # the alarm is of a fall, not of good news


def assess(
    curve: Curve,
    *,
    horizon: float | None = None,
    patience: int = DEFAULT_PATIENCE,
    level: float = 0.9,
    alarm_level: float = DEFAULT_ALARM_LEVEL,
) -> Status:
    """Fit a run so far, forecast it, and compare it with its earlier forecast.

    Args:
        curve: the evaluations so far.
        horizon: compute to forecast; twice the present one by default.
        patience: consecutive evaluations on one side of the band that make an alarm.
        level: of the intervals and the forecast's band.
        alarm_level: of the band that evaluations are held against.
    """
    status = Status(
        name=curve.name,
        x_name=curve.x_name,
        y_name=curve.y_name,
        x_last=float(curve.x[-1]),
        y_last=float(curve.y[-1]),
        num_points=curve.x.size,
        last_step=curve.last_step,
        level=level,
        alarm_level=alarm_level,
        waiting=None,
    )
    try:
        result = fit_curve(curve, level=level)
    except CurveError as failure:
        return dataclasses.replace(status, waiting=str(failure))
    horizon = max(horizon or 2.0 * status.x_last, status.x_last)
    low, high = result.band(horizon)
    status = dataclasses.replace(
        status,
        fit=result,
        horizon=horizon,
        forecast=float(result.forecast(horizon)),
        forecast_band=Interval(float(low), float(high)),
    )
    found = _check(curve, alarm_level)
    if found is not None:
        first, checks = found
        holds = first.bounded and (first.r0_free is None or first.r0_free.bounded)
        status = dataclasses.replace(
            status, fitted_until=first.x_last, holds=holds, checks=checks
        )
    return _with_alarm(status, curve, patience)


def _check(curve: Curve, level: float) -> tuple[Fit, tuple[Check, ...]] | None:
    """A fit of the first half of the compute, and the points after it against that."""
    needed = (4 if curve.r0 is None else 3) + SPARE_POINTS
    count = max(int((curve.x <= 0.5 * curve.x[-1]).sum()), needed)
    if count >= curve.x.size or np.ptp(curve.y[:count]) == 0:
        return None
    first = curve.part(np.arange(curve.x.size) < count)
    result = fit_curve(first, level=level)
    if not result.climbs:
        return None
    x, y = curve.x[count:], curve.y[count:]
    predicted = result.forecast(x)
    low, high = result.prediction_band(x)
    sides = np.where(y > high, 1, np.where(y < low, -1, 0))
    return result, tuple(
        Check(
            x=float(x[i]),
            actual=float(y[i]),
            predicted=float(predicted[i]),
            band=Interval(float(low[i]), float(high[i])),
            side=int(sides[i]),
        )
        for i in range(x.size)
    )


def _with_alarm(status: Status, curve: Curve, patience: int) -> Status:
    """The status with its alarm, if there is cause for one."""
    assert status.fit is not None, "asked by the caller"
    fall = find_fall(curve) if curve.y.size >= FEWEST_FOR_A_FALL else None
    if fall is not None:
        return dataclasses.replace(status, alarm=fall, falling=True)
    last = status.checks[-patience:]
    side = last[-1].side if last else 0
    if not status.holds or len(last) < patience:
        return status
    if side == 0 or any(check.side != side for check in last):
        return status
    where = "above" if side > 0 else "below"
    return dataclasses.replace(
        status,
        alarm=f"the last {patience} evaluations are {where} the "
        f"{100 * status.alarm_level:g}"
        f" % band that the run foretold up to {status.x_name} = "
        f"{status.fitted_until:.4g}",
        falling=side < 0,
    )


def scalars(status: Status) -> dict[str, float]:
    """The status as numbers for TensorBoard; what is not known is left out."""
    found: dict[str, float | None] = {
        "actual": status.y_last,
        "alarm": float(status.alarm is not None),
        "forecast": status.forecast,
    }
    for name, interval in (("forecast", status.forecast_band),):
        if interval is not None:
            found[f"{name}_low"], found[f"{name}_high"] = interval.low, interval.high
    if status.checks:
        last = status.checks[-1]
        found |= {
            "predicted": last.predicted,
            "predicted_low": last.band.low,
            "predicted_high": last.band.high,
        }
    if status.fit is not None:
        found |= {"identified": float(status.fit.identified)}
        if status.fit.identified:
            found |= {
                "A": status.fit.asymptote,
                "A_low": status.fit.asymptote_interval.low,
                "A_high": status.fit.asymptote_interval.high,
                "B": status.fit.exponent,
                "C_mid": status.fit.midpoint,
            }
    return {
        name: value
        for name, value in found.items()
        if value is not None and math.isfinite(value)
    }


def to_text(status: Status, *, shown: int = 8) -> str:
    """The status as a table for a terminal."""
    lines = [
        f"{status.name}: {status.num_points} evaluations, the last at {status.x_name} "
        f"= {status.x_last:.4g} with {status.y_name} {status.y_last:.4f}"
    ]
    if status.fit is None:
        return "\n".join([*lines, f"  no fit yet: {status.waiting}"]) + "\n"
    assert status.forecast_band is not None and status.forecast is not None
    level = f"{100 * status.level:g} %"
    result, band = status.fit, status.forecast_band
    if result.identified:
        interval = result.asymptote_interval
        lines.append(
            f"  A {result.asymptote:.4f} [{interval.low:.4f}, {interval.high:.4f}], "
            f"B {result.exponent:.3g}, C_mid {result.midpoint:.4g}"
        )
    else:
        lines.append(f"  A not identified: {result.reason}")
    if result.climbs:
        lines.append(
            f"  forecast at {status.x_name} = {status.horizon:.4g}: "
            f"{status.forecast:.4f}, {level} band [{band.low:.4f}, {band.high:.4f}]"
        )
    if status.checks:
        lines += [
            f"  foretold from {status.x_name} <= {status.fitted_until:.4g}:",
            f"  {status.x_name:>20}  actual  predicted  "
            f"{100 * status.alarm_level:g} % band",
        ]
    for check in status.checks[-shown:]:
        mark = {1: "  above", -1: "  below", 0: ""}[check.side]
        lines.append(
            f"  {check.x:20.5g}  {check.actual:6.4f}  {check.predicted:9.4f}  "
            f"[{check.band.low:.4f}, {check.band.high:.4f}]{mark}"
        )
    if status.checks and not status.holds:
        lines.append("  A had no upper limit then: leaving the band is no alarm")
    lines.append(f"  ALARM: {status.alarm}" if status.alarm else "  no alarm")
    return "\n".join(lines) + "\n"
