"""Tan et al.'s form with a plateau, Kaplan's law carried over to post-training.

    L(N, X) = ((N0 / N)^beta + B(N) / (X + C(N)))^alpha

L = 1 - pass rate, N model parameters, X compute or data; B and C are one number per
model size each.  At X without end the error stays at (N0 / N)^(alpha beta).  From the
code of https://arxiv.org/abs/2509.25300, where it is called "postopenai".
"""

import numpy as np
from numpy.typing import ArrayLike

from scalerl_jax.scaling.curves import CurveError
from scalerl_jax.scaling.laws import Array
from scalerl_jax.scaling.surfaces import (
    SurfaceFit,
    SurfaceLaw,
    check_inputs,
    fit_surface,
)

ALPHA_STARTS = (0.1, 0.2, 0.4, 0.8)
OFFSET_STARTS = np.geomspace(1e-3, 1e3, 61)  # of C, in units of the largest x


def plateau_law(sizes: Array) -> SurfaceLaw:
    """The law for these model sizes [S], in parameters."""
    labels = [f"{size / 1e9:g}B" for size in sizes]

    def function(p: dict[str, float], size: Array, x: Array) -> Array:
        known = np.argmin(np.abs(size[..., None] - sizes), axis=-1)
        if not np.array_equal(np.broadcast_to(size, known.shape), sizes[known]):
            raise ValueError(f"B and C are known for the sizes {sizes.tolist()} only")
        scale = np.array([p[f"B[{label}]"] for label in labels])[known]
        offset = np.array([p[f"C[{label}]"] for label in labels])[known]
        floor = (p["N0"] / size) ** p["beta"]
        return (floor + scale / (x + offset)) ** p["alpha"]

    by_size = {}
    for label in labels:
        by_size[f"B[{label}]"] = ("scale of what training removes", "x")
        by_size[f"C[{label}]"] = ("offset of x", "x")
    return SurfaceLaw(
        name="tan_plateau",
        formula="L(N, X) = ((N0 / N)^beta + B(N) / (X + C(N)))^alpha",
        source="https://arxiv.org/abs/2509.25300, code",
        input_names=("model_size", "x"),
        output_name="error",
        meanings={
            "N0": ("model size whose error never falls below 1", "parameters"),
            "beta": ("exponent of model size", ""),
            "alpha": ("outer exponent", ""),
            **by_size,
        },
        function=function,
    )


def fit_plateau(
    model_size: ArrayLike, x: ArrayLike, error: ArrayLike, *, level: float = 0.9
) -> SurfaceFit:
    """Fit the law to points [n] of at least three model sizes.

    At a given alpha, L^(1/alpha) of one size is a level plus B / (x + C), which gives
    the starts; then everything is fitted together by least squares of the error.
    """
    sizes = np.unique(np.asarray(model_size, np.float64))
    inputs, errors = check_inputs(
        [model_size, x], ["model_size", "x"], error, "error", 3 + 2 * len(sizes)
    )
    if len(sizes) < 3:
        raise CurveError(
            f"{len(sizes)} model sizes; the law needs three, as N0, beta and alpha are "
            "shared by all"
        )
    law = plateau_law(sizes)
    size, compute = inputs
    starts = [_start(sizes, size, compute, errors, alpha) for alpha in ALPHA_STARTS]
    return fit_surface(law, inputs, errors, starts, level=level)


def _start(
    sizes: Array, size: Array, x: Array, error: Array, alpha: float
) -> dict[str, float]:
    """Parameters near the best ones at a given alpha."""
    floors, start = [], {"alpha": alpha}
    for known in sizes:
        here, target = x[size == known], error[size == known] ** (1.0 / alpha)
        fits = []
        for offset in OFFSET_STARTS * x.max():
            basis = np.stack([np.ones_like(here), 1.0 / (here + offset)], axis=1)
            (floor, scale), *_ = np.linalg.lstsq(basis, target, rcond=None)
            floor, scale = max(floor, 1e-3 * target.min()), max(scale, 1e-6 * offset)
            misfit = target - basis @ np.array([floor, scale])
            fits.append((float((misfit**2).sum()), floor, scale, offset))
        _, floor, scale, offset = min(fits)
        floors.append(floor)
        label = f"{known / 1e9:g}B"
        start[f"B[{label}]"], start[f"C[{label}]"] = float(scale), float(offset)
    slope, intercept = np.polyfit(np.log(sizes), np.log(floors), 1)
    beta = max(-float(slope), 0.05)
    return start | {"beta": beta, "N0": float(np.exp(intercept / beta))}
