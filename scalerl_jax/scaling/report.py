"""A fit as JSON and as text for a terminal.

Nothing is computed here that is not in the `Fit`; an unidentified asymptote is never
written as a bare number.
"""

import json
import math
from typing import Any

from scalerl_jax.scaling.curves import Curve
from scalerl_jax.scaling.fit import Fit
from scalerl_jax.scaling.uncertainty import Interval


def to_dict(result: Fit) -> dict[str, Any]:
    """The fit under the names of the paper, ready for JSON.

    Numbers that are not finite, and limits that the data do not set, are None.
    """
    half = result.half_forecast
    record = {
        "x_name": result.x_name,
        "y_name": result.y_name,
        "x_last": result.x_last,
        "n_points": result.num_points,
        "level": result.level,
        "R0_source": result.initial_reward_source,
        **_parameters(result),
        "r0_free": _parameters(result.r0_free or result)
        if result.r0_free or result.initial_reward_free
        else None,
        "half_forecast": None
        if half is None
        else {
            "fit_until": half.fit_until,
            "predicted": half.predicted,
            "actual": half.actual,
            "error": half.error,
        },
        "warnings": list(result.warnings),
    }
    return _finite(record)


def to_json(result: Fit) -> str:
    """One JSON object, with a newline at its end."""
    return json.dumps(to_dict(result), indent=2, allow_nan=False) + "\n"


def _parameters(result: Fit) -> dict[str, Any]:
    """What differs between R0 fixed and R0 free."""
    r0 = result.initial_reward_interval or Interval(None, None)
    return {
        "R0": result.initial_reward,
        "A": result.asymptote,
        "B": result.exponent,
        "C_mid": result.midpoint,
        "R0_low": r0.low,
        "R0_high": r0.high,
        "A_low": result.asymptote_interval.low,
        "A_high": result.asymptote_interval.high,
        "B_low": result.exponent_interval.low,
        "B_high": result.exponent_interval.high,
        "C_mid_low": result.midpoint_interval.low,
        "C_mid_high": result.midpoint_interval.high,
        "climbs": result.climbs,
        "identified": result.identified,
        "reason": result.reason,
        "r_squared": result.r_squared,
        "sigma": result.sigma,
    }


def _finite(value: Any) -> Any:  # noqa: ANN401  any JSON value
    """The same value with None for every number that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_text(result: Fit, curve: Curve) -> str:
    """A short table for a terminal."""
    level = f"{100 * result.level:g} %"
    if result.initial_reward_free:
        r0 = _estimate(result.initial_reward, result.initial_reward_interval, ".4f")
        r0 += "  (free: not measured)"
    else:
        r0 = f"{result.initial_reward:.4f}  ({result.initial_reward_source})"
    asymptote = _estimate(result.asymptote, result.asymptote_interval, ".4f")
    if not result.identified:
        asymptote = f"not identified: {result.reason}"
    exponent = _estimate(result.exponent, result.exponent_interval, ".3g")
    midpoint = _estimate(result.midpoint, result.midpoint_interval, ".4g")
    if not result.climbs:
        exponent = midpoint = "without meaning: see A"
    rows = [
        ("points", f"{result.num_points}, {_span(curve)}"),
        (result.y_name, f"{curve.y[0]:.4f} first, {curve.y[-1]:.4f} last"),
        ("R0", r0),
        ("A", asymptote),
        ("B", exponent),
        ("C_mid", midpoint),
        ("R^2", f"{result.r_squared:.4f}  (noise {result.sigma:.4f})"),
        ("R0 free", _free_row(result)),
        ("forecast", _forecast_row(result)),
    ]
    lines = [
        f"ScaleRL sigmoid of {result.y_name} over {result.x_name}; brackets: {level} "
        "profile intervals",
        *(f"  {name:<10} {text}" for name, text in rows),
        *(f"warning: {warning}" for warning in result.warnings),
    ]
    return "\n".join(lines) + "\n"


def _span(curve: Curve) -> str:
    """From where to where the points reach."""
    return f"{curve.x_name} {curve.x[0]:.4g} to {curve.x[-1]:.4g}"


def _estimate(value: float, interval: Interval | None, form: str) -> str:
    """A value with its interval; an open side says so."""
    if interval is None:
        return f"{value:{form}}"
    low = "no limit" if interval.low is None else f"{interval.low:{form}}"
    high = "no limit" if interval.high is None else f"{interval.high:{form}}"
    return f"{value:{form}}  [{low}, {high}]"


def _free_row(result: Fit) -> str:
    """What changes when R0 is fitted as well."""
    if result.initial_reward_free:
        return "as above"
    free = result.r0_free
    if free is None:
        return "needs 5 points"
    if not free.climbs:
        return "without meaning: see A"
    asymptote = _estimate(free.asymptote, free.asymptote_interval, ".4f")
    if not free.identified:
        asymptote = "not identified"
    return (
        f"R0 {free.initial_reward:.4f}, A {asymptote}, "
        f"B {free.exponent:.3g}, C_mid {free.midpoint:.4g}"
    )


def _forecast_row(result: Fit) -> str:
    """How well the first half of the compute foretells the last evaluation."""
    half = result.half_forecast
    if half is None:
        return "none: the first half of the compute has too few points, or falls"
    return (
        f"fitted up to {half.fit_until:.4g}: last point predicted "
        f"{half.predicted:.4f}, measured {half.actual:.4f}, error {half.error:+.4f}"
    )
