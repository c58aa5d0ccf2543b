"""Comparison of a run with its own earlier forecast, and the alarm if it leaves that.

The forecast is the paper's: the points up to half of the present compute predict the
rest.  It is made again as the run continues, so a slow departure shows only while it is
in the second half; an alarm is never withdrawn (`live.py`).
"""

import dataclasses
import math
from typing import Any

import numpy as np

from scalerl_jax.scaling.fit import fit_curve
from scalerl_jax.scaling.identifiability import find_collapse
from scalerl_jax.scaling.records import OPEN, Curve, CurveError, Interval, amount
from scalerl_jax.scaling.result import Fit
from scalerl_jax.scaling.text import (
    AMOUNT,
    means_text,
    number,
    percent,
    show,
    table,
    warned,
)

DEFAULT_PATIENCE = 3
# All points are compared with one curve, so a curve that is off puts many outside: the
# band, and not the number of points in a row, keeps false alarms rare.  60 simulated
# runs that follow the law (noise 0.008) gave one in 480 looks; with 90 % bands, and
# without requiring a bounded A, 8 in 100 looks.
DEFAULT_ALARM_LEVEL = 0.99
SPARE_POINTS = 2  # least points of a forecast beyond its number of parameters
# A fall is an alarm from this many evaluations on: an earlier one may be the start of
# a run, before it has learned anything.
FEWEST_FOR_A_FALL = 8
SHOWN_CHECKS = 8  # in a terminal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One evaluation, compared with the forecast from earlier ones."""

    x: float
    actual: float  # pass rate
    predicted: float  # pass rate
    band: Interval  # of one evaluation: the curve's uncertainty and the noise
    side: int  # 1 above the band, -1 below it, 0 inside


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """State of a run that is under way."""

    curve: Curve  # the evaluations so far
    level: float  # of the intervals and the forecast's band
    alarm_level: float  # of the bands in `checks`
    waiting: str | None = None  # why there is no fit yet
    fit: Fit | None = None  # of all points so far
    horizon: float = math.nan  # compute that is forecast
    forecast: float = math.nan  # pass rate there
    forecast_band: Interval = OPEN  # of the curve there
    fitted_until: float | None = None  # last compute that the checks' forecast fitted
    holds: bool = False  # that fit bounded A, so leaving its band is an alarm
    checks: tuple[Check, ...] = ()
    alarm: str | None = None
    falling: bool = False  # the alarm is of a fall, not of a rise


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
        alarm_level: of the band that evaluations are compared with.
    """
    status = Status(curve=curve, level=level, alarm_level=alarm_level)
    try:
        result = fit_curve(curve, level=level)
    except CurveError as failure:
        return dataclasses.replace(status, waiting=str(failure))
    horizon = max(horizon or 2.0 * result.x_last, result.x_last)
    low, high = result.forecast_band(horizon)
    status = dataclasses.replace(
        status,
        fit=result,
        horizon=horizon,
        forecast=float(result.forecast(horizon)),
        forecast_band=Interval(float(low), float(high)),
        **_checked(curve, alarm_level),
    )
    alarm, falling = _alarm(status, patience)
    return dataclasses.replace(status, alarm=alarm, falling=falling)


def _checked(curve: Curve, level: float) -> dict[str, Any]:
    """Fit the first half of the compute, and compare the later points with that."""
    needed = (4 if curve.r0 is None else 3) + SPARE_POINTS
    count = max(int((curve.x <= 0.5 * curve.x[-1]).sum()), needed)
    if count >= curve.x.size or np.ptp(curve.y[:count]) == 0:
        return {}
    first = fit_curve(curve.part(np.arange(curve.x.size) < count), level=level)
    if not first.climbs:
        return {}
    x, y = curve.x[count:], curve.y[count:]
    low, high = first.prediction_band(x)
    sides = np.where(y > high, 1, np.where(y < low, -1, 0))
    columns = (each.tolist() for each in (x, y, first.forecast(x), low, high, sides))
    checks = tuple(
        Check(x=at, actual=actual, predicted=foretold, band=Interval(*ends), side=side)
        for at, actual, foretold, *ends, side in zip(*columns, strict=True)
    )
    holds = first.bounded and (first.r0_free is None or first.r0_free.bounded)
    return {"fitted_until": first.x_last, "holds": holds, "checks": checks}


def _alarm(status: Status, patience: int) -> tuple[str | None, bool]:
    """Return the alarm, if any, and whether it is of a fall."""
    curve = status.curve
    fall = find_collapse(curve) if curve.y.size >= FEWEST_FOR_A_FALL else None
    if fall is not None:
        return fall, True
    sides = {check.side for check in status.checks[-patience:]}
    if not status.holds or len(status.checks) < patience or sides not in ({1}, {-1}):
        return None, False
    where = "above" if sides == {1} else "below"
    alarm = (
        f"the last {patience} evaluations are {where} the "
        f"{percent(status.alarm_level)} band that the run foretold up to "
        f"{curve.x_name} = {number(status.fitted_until, AMOUNT)}"
    )
    return alarm, where == "below"


def scalars(status: Status) -> dict[str, float]:
    """Return the status as numbers for TensorBoard, without unknown values."""
    found: dict[str, float | None] = {
        "actual": float(status.curve.y[-1]),
        "alarm": float(status.alarm is not None),
        "forecast": status.forecast,
        "forecast_low": status.forecast_band.low,
        "forecast_high": status.forecast_band.high,
    }
    if status.checks:
        last = status.checks[-1]
        found |= {
            "predicted": last.predicted,
            "predicted_low": last.band.low,
            "predicted_high": last.band.high,
        }
    result = status.fit
    if result is not None:
        found["identified"] = float(result.identified)
    if result is not None and result.identified:
        found |= {
            "A": result.asymptote,
            "A_low": result.asymptote_interval.low,
            "A_high": result.asymptote_interval.high,
            "B": result.exponent,
            "C_mid": result.midpoint,
        }
    return {n: v for n, v in found.items() if v is not None and math.isfinite(v)}


def to_text(status: Status) -> str:
    """Return the status as a table for a terminal."""
    curve = status.curve
    said = (
        f"{curve.name}: {curve.x.size} evaluations, the last at {curve.x_name} = "
        f"{amount(curve.x[-1])} with {curve.y_name} {curve.y[-1]:.4f}"
    )
    result = status.fit
    if result is None:
        return f"{said}\n  no fit yet: {status.waiting}\n"
    said += f"{means_text(result)}\n"
    if result.identified:
        said += (
            f"  A {result.asymptote:.4f} {show(result.asymptote_interval, '.4f')}, "
            f"B {result.exponent:.3g}, C_mid {amount(result.midpoint)}\n"
        )
    else:
        said += f"  A not identified: {result.reason}\n"
    if result.climbs:
        said += (
            f"  forecast at {curve.x_name} = {amount(status.horizon)}: "
            f"{status.forecast:.4f}, {percent(status.level)} band "
            f"{show(status.forecast_band, '.4f')}\n"
        )
    if status.checks:
        band = f"{percent(status.alarm_level)} band"
        until = number(status.fitted_until, AMOUNT)
        said += f"  foretold from {curve.x_name} <= {until}:\n"
        said += table(
            (curve.x_name, "actual", "predicted", band, ""),
            [
                (
                    f"{check.x:.5g}",
                    f"{check.actual:.4f}",
                    f"{check.predicted:.4f}",
                    show(check.band, ".4f"),
                    {1: "above", -1: "below", 0: ""}[check.side],
                )
                for check in status.checks[-SHOWN_CHECKS:]
            ],
        )
    if status.checks and not status.holds:
        said += "  A had no upper limit then: leaving the band is no alarm\n"
    said += warned(result.warnings)
    return said + (f"  ALARM: {status.alarm}\n" if status.alarm else "  no alarm\n")
