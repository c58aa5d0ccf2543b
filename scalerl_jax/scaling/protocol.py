"""ScaleRL's own fitting procedure, for numbers that compare with the paper's.

Appendix A.5-A.7 of https://arxiv.org/abs/2510.13786: A and C_mid on grids, B by
SciPy's `curve_fit` at each pair, unweighted, R0 held, first 1.5k GPU-hours left out;
the pair with the least sum of squares wins.  The text states one grid of C_mid, 100
linear values in [100, 40000]; the published values are not on it.  Nine of the ten
are integer parts of 100 linear values in [100, 4000] (short runs) or [4000, 40000]
(long ones), and the tenth (4242) lies between their nodes; a third piece, [4000,
12000], closes that gap.  So the resolution is 0.005 in A, and in C_mid 39, 81 and 364
GPU-hours in turn.

The paper states no intervals.  Those here are the default fit's, with R0 held, on
the same points.
"""

import dataclasses

import numpy as np

from scalerl_jax.scaling.curves import Curve, CurveError
from scalerl_jax.scaling.fit import fit_checked, keep_from
from scalerl_jax.scaling.laws import SIGMOID, Array, sigmoid
from scalerl_jax.scaling.result import Fit, Settings
from scalerl_jax.scaling.search import R0, SHAPE_U, SHAPE_V, A, Problem, descend

FIT_FROM = 1500.0  # GPU-hours
ASYMPTOTES = np.round(np.arange(0.450, 0.8001, 0.005), 3)  # 71
MIDPOINT_PIECES = ((100.0, 4000.0), (4000.0, 12000.0), (4000.0, 40000.0))
MIDPOINTS_PER_PIECE = 100
# Each pair's sum of squares is first taken at the best of these B, a node every 5 %;
# the pairs that come out best so are then refined.
EXPONENT_NODES = np.geomspace(0.2, 12.0, 85)
NUM_REFINED = 300


def midpoint_grid() -> Array:
    """The values of C_mid that are tried, in GPU-hours, increasing."""
    pieces = [np.linspace(*ends, MIDPOINTS_PER_PIECE) for ends in MIDPOINT_PIECES]
    return np.unique(np.concatenate(pieces).astype(np.int64)).astype(np.float64)


def fit_as_paper(whole: Curve, settings: Settings) -> Fit:
    """Fit a curve over GPU-hours by the paper's procedure.

    Args:
        whole: the curve; its x in hours of a GPU or chip, as the grids are.
        settings: `fit_from` is 1.5k hours unless it is given.

    Raises:
        CurveError: another law or loss, an R0 that is not known, or data that end
            before the grid of C_mid begins.
    """
    if settings.law != "sigmoid" or settings.robust:
        raise CurveError(
            "--protocol paper fits the sigmoid by plain squares; drop --law and "
            "--robust, or take --protocol default"
        )
    if settings.fit_from is None:
        settings = dataclasses.replace(settings, fit_from=FIT_FROM)
    if whole.x[-1] < MIDPOINT_PIECES[0][0]:
        raise CurveError(
            f"--protocol paper looks for C_mid between {MIDPOINT_PIECES[0][0]:g} and "
            f"{MIDPOINT_PIECES[-1][1]:g} GPU-hours, but the data end at "
            f"{whole.x_name} = {whole.x[-1]:g}; take --protocol default"
        )
    known = isinstance(settings.initial_reward, int | float) or whole.r0 is not None
    if not known or settings.initial_reward == "free":
        raise CurveError(
            "--protocol paper holds R0; give --r0, or a point at zero compute"
        )
    whole = dataclasses.replace(whole, y_se=None)
    usual = fit_checked(whole, settings)
    curve = keep_from(whole, settings.fit_from)
    a, exponent, midpoint = search_grids(curve, usual.initial_reward)
    return _with_values(usual, a, exponent, midpoint)


def search_grids(curve: Curve, initial_reward: float) -> tuple[float, float, float]:
    """A, B and C_mid at the pair of grid values with the least sum of squares."""
    from scipy.optimize import curve_fit

    midpoints = midpoint_grid()
    costs = _rough_costs(curve, initial_reward, midpoints)  # [A, C_mid, B]
    nodes = np.argmin(costs, axis=2)
    rough = np.take_along_axis(costs, nodes[:, :, None], axis=2)[:, :, 0]
    best = np.argsort(rough, axis=None)[:NUM_REFINED]
    rows, columns = np.unravel_index(best, rough.shape)

    theta = np.empty((len(best), 4))
    theta[:, R0], theta[:, A] = initial_reward, ASYMPTOTES[rows]
    theta[:, SHAPE_U] = np.log(EXPONENT_NODES[nodes[rows, columns]])
    theta[:, SHAPE_V] = np.log(midpoints[columns] / curve.x[-1])
    problem = Problem(
        law=SIGMOID,
        t=np.log(curve.x / curve.x[-1]),
        y=curve.y[None],
        weights=np.ones(curve.x.size),
        held={R0: initial_reward},
    )
    held = np.zeros(theta.shape, bool)
    held[:, [A, SHAPE_V]] = True
    theta, costs, _ = descend(problem, theta, tolerance=1e-18, held=held)
    winner = int(np.argmin(costs))
    asymptote, midpoint = ASYMPTOTES[rows[winner]], midpoints[columns[winner]]

    def rate(x: Array, exponent: float) -> Array:
        return sigmoid(
            x,
            initial_reward=initial_reward,
            asymptote=float(asymptote),
            exponent=exponent,
            midpoint=float(midpoint),
        )

    (exponent,), _ = curve_fit(rate, curve.x, curve.y)
    return float(asymptote), float(exponent), float(midpoint)


def _rough_costs(curve: Curve, initial_reward: float, midpoints: Array) -> Array:
    """Sums of squares [A, C_mid, B]: quadratic in A, so three sums serve all A."""
    log_ratio = np.log(curve.x / midpoints[:, None])[:, None, :]
    share = 0.5 * (1.0 + np.tanh(0.5 * EXPONENT_NODES[:, None] * log_ratio))
    gain = curve.y - initial_reward
    share_gain, share_share = share @ gain, (share**2).sum(axis=2)
    height = (ASYMPTOTES - initial_reward)[:, None, None]
    return (gain**2).sum() - 2.0 * height * share_gain + height**2 * share_share


def _with_values(usual: Fit, a: float, exponent: float, midpoint: float) -> Fit:
    """The default fit with the grids' numbers in place of its own."""
    values = {"A": a, "B": exponent, "C_mid": midpoint}
    parameters = {
        name: dataclasses.replace(parameter, value=values.get(name, parameter.value))
        for name, parameter in usual.parameters.items()
    }
    theta = usual.theta.copy()
    theta[A], theta[SHAPE_U] = a, np.log(exponent)
    theta[SHAPE_V] = np.log(midpoint / usual.x_last)
    residuals = usual.curve.y - usual.curves(theta[None], usual.curve.x)[0]
    spread = ((usual.curve.y - usual.curve.y.mean()) ** 2).sum()
    warnings = usual.warnings
    if a in (ASYMPTOTES[0], ASYMPTOTES[-1]):
        warnings += (
            f"A = {a:g} is at the end of the paper's grid, {ASYMPTOTES[0]:g} to "
            f"{ASYMPTOTES[-1]:g}: the best A may lie beyond",
        )
    if midpoint in (midpoint_grid()[0], midpoint_grid()[-1]):
        warnings += (f"C_mid = {midpoint:g} is at the end of the paper's grid",)
    return dataclasses.replace(
        usual,
        protocol="paper",
        parameters=parameters,
        theta=theta,
        r_squared=1.0 - float((residuals**2).sum() / spread),
        warnings=warnings,
    )
