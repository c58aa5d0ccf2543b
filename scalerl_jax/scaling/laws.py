"""The scaling law: pass rate as a function of compute.

Only formulas are here: a law neither reads files, nor fits itself, nor knows which
unit its compute has (chip-hours, FLOPs, tokens or steps all do).
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray


def gained_share(
    log_x: NDArray[np.float64],
    exponent: NDArray[np.float64] | float,
    log_midpoint: NDArray[np.float64] | float,
) -> NDArray[np.float64]:
    """The share of the gain A - R0 reached at x, in [0, 1].

        share = 1 / (1 + (C_mid / x)^B)

    Arguments broadcast against each other; log_x is -inf at x = 0, where the share
    is 0.  Written with tanh, which cannot overflow far from the midpoint.
    """
    return 0.5 * (1.0 + np.tanh(0.5 * exponent * (log_x - log_midpoint)))


def sigmoid(
    x: ArrayLike,
    *,
    initial_reward: float,
    asymptote: float,
    exponent: float,
    midpoint: float,
) -> NDArray[np.float64]:
    """Pass rate after compute x, by ScaleRL's sigmoid.

        R(x) = R0 + (A - R0) / (1 + (C_mid / x)^B)

    with R0 = initial_reward, A = asymptote, B = exponent and C_mid = midpoint, the
    compute at which half of the gain is reached.  https://arxiv.org/abs/2510.13786,
    equation 1.

    Args:
        x: compute, any shape, at least 0, in the unit of `midpoint`.

    Returns:
        Pass rates in the shape of x.
    """
    compute = np.asarray(x, dtype=np.float64)
    if np.any(compute < 0):
        raise ValueError(
            f"compute x = {compute.min():g} is below its limit 0; "
            "pass the compute spent since the start of the run"
        )
    with np.errstate(divide="ignore"):  # log 0 = -inf gives a share of exactly 0
        log_x = np.log(compute)
    share = gained_share(log_x, exponent, math.log(midpoint))
    return initial_reward + (asymptote - initial_reward) * share
