"""Scaling laws of reinforcement learning, fitted to evaluation curves.

NumPy and SciPy only: this package imports neither JAX nor the rest of the trainer, so
that curves of any system can be fitted anywhere.

    from scalerl_jax import scaling

    curve = scaling.load_curve("runs/tiny")
    result = scaling.fit_curve(curve)
    result.identified, result.asymptote, result.predict(10 * curve.x[-1])
"""

from scalerl_jax.scaling.curves import Curve, CurveError, load_curve
from scalerl_jax.scaling.fit import Fit, Forecast, fit, fit_curve
from scalerl_jax.scaling.laws import sigmoid
from scalerl_jax.scaling.uncertainty import Interval

__all__ = [
    "Curve",
    "CurveError",
    "Fit",
    "Forecast",
    "Interval",
    "fit",
    "fit_curve",
    "load_curve",
    "sigmoid",
]
