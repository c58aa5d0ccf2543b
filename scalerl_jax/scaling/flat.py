"""Flat: does a curve climb by more than the noise of its points explains?

A test with an exact rate of false alarms that asks for no law: isotonic regression
against a constant.
"""

import numpy as np

from scalerl_jax.scaling.laws import Array

# Share of flat curves with independent normal noise that are said to climb.
FALSE_CLIMBS = 0.05
MOST_LEVELS = 64  # more distinct levels by chance alone: never


def climb_p_value(y: Array, weights: Array, start: float | None = None) -> float:
    """Chance that noise alone makes a constant curve climb as far as y [n] does.

        E = sum w (iso - level)^2 / sum w (y - level)^2

    with iso the best nondecreasing curve and level the best constant, or a `start` that
    is known, which iso then begins at.  For a constant with normal noise of any size,

        P(E >= e) = sum_l p(l) P(Beta(l / 2, (m - l) / 2) >= e)

    where l counts the levels of iso beyond the constant's and p(l) are the coefficients
    of prod_k (z + k) / (1 + k): over k = 1, 2, .. m with m = n - 1, or over k = 1, 3,
    .. 2 m - 1 with m = n when the start is known.  Barlow, Bartholomew, Bremner and
    Brunk, Statistical Inference under Order Restrictions, theorem 3.2; p(l) is exact
    for equal weights.
    """
    from scipy.optimize import isotonic_regression  # here: half of the import time
    from scipy.special import betainc

    level = float(y @ weights / weights.sum()) if start is None else start
    climb = np.asarray(isotonic_regression(y, weights=weights).x) - level
    if start is not None:
        climb = np.maximum(climb, 0.0)
    total = float(weights @ (y - level) ** 2)
    if total == 0.0:
        return 1.0
    explained = min(float(weights @ climb**2) / total, 1.0)
    spare = y.size - (start is None)
    chances = level_chances(spare, 1.0 if start is None else 2.0)
    levels = np.arange(chances.size)
    # Beta(0, b) is 0 for certain, Beta(a, 0) is 1: so are E without levels, and with
    # as many as points.
    beyond = np.where(levels == spare, 1.0, float(explained <= 0.0))
    inner = (levels > 0) & (levels < spare)
    half = levels[inner] / 2.0
    beyond[inner] = betainc(spare / 2.0 - half, half, 1.0 - explained)
    return float(chances @ beyond)


def level_chances(count: int, step: float) -> Array:
    """p(l) for l = 0, 1, ..: coefficients of prod_k (z + k) / (1 + k).

    k = 1, 1 + step, ..: `count` of them; l stops at MOST_LEVELS.
    """
    chances = np.zeros(min(count, MOST_LEVELS) + 1)
    chances[0] = 1.0
    for k in 1.0 + step * np.arange(count):
        chances[1:] = (chances[:-1] + k * chances[1:]) / (1.0 + k)
        chances[0] *= k / (1.0 + k)
    return chances
