"""ScaleRL's own fitting procedure, for numbers that compare with the paper's.

Appendix A.5-A.7 of https://arxiv.org/abs/2510.13786: A and C_mid on grids, B by
SciPy's `curve_fit` at each pair, unweighted, R0 held, first 1.5k GPU-hours left out;
the pair with the least sum of squares wins.  The text states one grid of C_mid, 100
linear values in [100, 40000]; the published values are not on it.  Nine of the ten
are integer parts of 100 linear values in [100, 4000] (short runs) or [4000, 40000]
(long ones), and the tenth (4242) lies between their nodes; a third piece, [4000,
12000], closes that gap.  So the resolution is 0.005 in A, and in C_mid 39, 81 and 364
GPU-hours in turn.

The paper states no intervals.  The intervals here are profiles of the same sum of
squares on the same grids, half a grid step wider, as the best value may be that far
off; an interval that reaches the end of a grid has no limit there.
"""

import dataclasses

import numpy as np

from scalerl_jax.scaling.bins import bin_points
from scalerl_jax.scaling.estimate import autocorrelation, name_parameters, noise_of
from scalerl_jax.scaling.identifiability import FitVerdict, durbin_watson
from scalerl_jax.scaling.laws import SIGMOID, sigmoid
from scalerl_jax.scaling.records import Array, Curve, CurveError, Interval, r_squared
from scalerl_jax.scaling.result import Fit, Forecast, Settings
from scalerl_jax.scaling.search import R0, SHAPE_U, SHAPE_V, A, Problem, descend
from scalerl_jax.scaling.uncertainty import student_quantile

FIT_FROM = 1500.0  # GPU-hours
ASYMPTOTES = np.round(np.arange(0.450, 0.8001, 0.005), 3)  # 71
MIDPOINT_PIECES = ((100.0, 4000.0), (4000.0, 12000.0), (4000.0, 40000.0))
MIDPOINTS = np.unique(  # of C_mid, in GPU-hours, increasing
    [np.linspace(*ends, 100).astype(np.int64) for ends in MIDPOINT_PIECES]
).astype(np.float64)
# Each pair's sum of squares is first minimised over these B, a node every 5 %, with a
# parabola through the best node and its neighbours; the best pairs are then refined.
LOG_EXPONENTS = np.log(np.geomspace(0.2, 12.0, 85))
NUM_REFINED = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridSearch:
    """The winning pair (A, C_mid), and the cost of every pair at its best B."""

    winner: tuple[int, int]  # its indices in ASYMPTOTES and MIDPOINTS
    values: dict[str, float]  # of the winner, by the argument names of `sigmoid`
    problem: Problem
    theta: Array  # [4] the winner as a row of the problem
    costs: Array  # [A, C_mid] sums of squares
    log_exponents: Array  # [A, C_mid] the best log B
    bends: Array  # [A, C_mid] second derivatives of the sum of squares by log B


def paper_settings(whole: Curve, settings: Settings) -> Settings:
    """Return the settings of a fit by the paper's procedure: first 1.5k hours left out.

    Args:
        whole: the curve; its x in hours of a GPU or chip, as the grids are.
        settings: the user's; a given `fit_from` is kept.

    Raises:
        CurveError: another law or loss, an unknown R0, or data that end before the
            grid of C_mid begins.
    """
    if settings.law != "sigmoid" or settings.robust or settings.weighs:
        raise CurveError(
            "--protocol paper fits the sigmoid by plain squares; drop --law, --robust, "
            "--weighted and --errors-known, or take --protocol default"
        )
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
    if settings.fit_from is None:
        return dataclasses.replace(settings, fit_from=FIT_FROM)
    return settings


def search_grids(curve: Curve, initial_reward: float) -> GridSearch:
    """Find A, B and C_mid at the pair of grid values with the least sum of squares."""
    from scipy.optimize import curve_fit

    problem = Problem(
        law=SIGMOID,
        t=np.log(curve.x / curve.x[-1]),
        y=curve.y[None],
        weights=np.ones(curve.x.size),
        held={R0: initial_reward},
    )
    problem = bin_points(problem)
    x = curve.x if problem.whole is None else np.exp(problem.t) * curve.x[-1]
    costs, log_exponents, bends = _profile(x, problem, initial_reward)
    best = np.argsort(costs, axis=None)[:NUM_REFINED]
    rows, columns = np.unravel_index(best, costs.shape)

    theta = np.empty((len(best), 4))
    theta[:, R0], theta[:, A] = initial_reward, ASYMPTOTES[rows]
    theta[:, SHAPE_U] = log_exponents[rows, columns]
    theta[:, SHAPE_V] = np.log(MIDPOINTS[columns] / curve.x[-1])
    held = np.zeros(theta.shape, bool)
    held[:, [A, SHAPE_V]] = True
    theta, refined, _ = descend(problem, theta, tolerance=1e-18, held=held)
    best = int(np.argmin(refined))
    row, column = int(rows[best]), int(columns[best])
    values = {
        "initial_reward": initial_reward,
        "asymptote": float(ASYMPTOTES[row]),
        "midpoint": float(MIDPOINTS[column]),
    }
    (exponent,), _ = curve_fit(
        lambda x, exponent: sigmoid(x, exponent=exponent, **values), curve.x, curve.y
    )
    theta[best, SHAPE_U] = np.log(exponent)
    return GridSearch(
        winner=(row, column),
        values=values | {"exponent": float(exponent)},
        problem=problem,
        theta=theta[best],
        costs=costs,
        log_exponents=log_exponents,
        bends=bends,
    )


def _profile(
    x: Array, problem: Problem, initial_reward: float
) -> tuple[Array, Array, Array]:
    """Return the least sum of squares over B, its log B and bend: [A, C_mid] each.

    The sum of squares is quadratic in A, so three sums serve all A; over log B it is
    approximated by a parabola around the best node.
    """
    log_ratio = np.log(x / MIDPOINTS[:, None])[:, None, :]
    exponents = np.exp(LOG_EXPONENTS)[:, None]
    share = 0.5 * (1.0 + np.tanh(0.5 * exponents * log_ratio))  # [C_mid, B, n]
    gain, weights = problem.y[0] - initial_reward, problem.weights
    share_gain, share_share = share @ (gain * weights), (share**2 * weights).sum(axis=2)
    height = (ASYMPTOTES - initial_reward)[:, None, None]
    costs = (
        (gain**2 * weights).sum() - 2.0 * height * share_gain + height**2 * share_share
    )
    node = np.clip(np.argmin(costs, axis=2), 1, len(LOG_EXPONENTS) - 2)[..., None]
    below, here, above = (
        np.take_along_axis(costs, node + step, axis=2)[..., 0] for step in (-1, 0, 1)
    )
    bend = np.maximum(below - 2.0 * here + above, 1e-300)
    moved = np.clip(0.5 * (below - above) / bend, -1.0, 1.0)  # in steps of log B
    step = LOG_EXPONENTS[1] - LOG_EXPONENTS[0]
    least = here + moved * (0.5 * (above - below) + 0.5 * bend * moved)
    return least, LOG_EXPONENTS[node[..., 0]] + step * moved, bend / step**2


def fit_on_grids(usual: Fit) -> Fit:
    """Fit again on the grids; `usual` gives what the procedure does not define."""
    found = search_grids(usual.curve, usual.initial_reward)
    curve, theta, problem = usual.curve, found.theta, found.problem
    half = usual.half_forecast
    if half is not None:
        first = search_grids(
            curve.part(curve.x <= half.fit_until), usual.initial_reward
        )
        predicted = float(sigmoid(curve.x[-1], **first.values))
        half = Forecast.of(half.fit_until, predicted, half.actual)
    unit_growth, sigma, degrees = noise_of(problem, theta, None)
    cost = float(problem.cost(theta[None])[0])
    excess = student_quantile(usual.level, degrees) ** 2 * unit_growth
    accepted, intervals = _accepted(found, curve, cost + excess)
    verdict = _verdict(usual, intervals[A])
    residuals = curve.y - usual.curves(theta[None], curve.x)[0]
    parameters = name_parameters(
        curve,
        SIGMOID,
        np.vstack([theta, accepted]),
        intervals,
        verdict,
        usual.parameters["R0"].source,
    )
    words = {"A": "asymptote", "B": "exponent", "C_mid": "midpoint"}
    for name, word in words.items():  # theta has their logarithms
        exact = found.values[word]
        parameters[name] = dataclasses.replace(parameters[name], value=exact)
    return dataclasses.replace(
        usual,
        protocol="paper",
        parameters=parameters,
        converged=True,
        identified=verdict.reason is None,
        reason=verdict.reason,
        r_squared=r_squared(curve.y, residuals),
        sigma=sigma,
        autocorrelation=autocorrelation(residuals),
        residual_p_value=durbin_watson(problem, theta),
        warnings=usual.warnings + _at_ends(found),
        half_forecast=half,
        problem=problem,
        theta=theta,
        cost=cost,
        unit_growth=unit_growth,
        degrees=degrees,
        accepted=accepted,
    )


def _verdict(usual: Fit, on_grid: Interval) -> FitVerdict:
    """Return the usual fit's verdict; A must be bounded above on the grid too."""
    reason, limits = usual.reason, usual.interval("A")
    if usual.climbs and on_grid.high is None:
        reason = (
            f"A = {ASYMPTOTES[-1]:g}, the end of the paper's grid, fits about as well; "
            "--protocol default looks up to 1"
        )
    high = None
    if reason is None and on_grid.high is not None and limits.high is not None:
        high = max(on_grid.high, limits.high)
    return FitVerdict(usual.climbs, usual.flat, Interval(on_grid.low, high), reason)


def _accepted(
    found: GridSearch, curve: Curve, limit: float
) -> tuple[Array, dict[int, Interval]]:
    """Return fits [K, 4] with a sum of squares up to the limit, and their intervals.

    Each pair is accepted with all B up to where its parabola reaches the limit.
    """
    pairs = found.costs <= limit
    pairs[found.winner] = True
    rows, columns = np.nonzero(pairs)
    middle = found.log_exponents[rows, columns]
    room = np.maximum(limit - found.costs[rows, columns], 0.0)
    reach = np.sqrt(2.0 * room / found.bends[rows, columns])
    ends = np.clip([middle - reach, middle, middle + reach], *LOG_EXPONENTS[[0, -1]])
    theta = np.empty((3, rows.size, 4))
    theta[..., R0], theta[..., A] = found.problem.held[R0], ASYMPTOTES[rows]
    theta[..., SHAPE_U] = ends
    theta[..., SHAPE_V] = np.log(MIDPOINTS[columns] / curve.x[-1])
    # The outermost C_mid of each A, and the outermost A of each C_mid, span the rest.
    outer = np.zeros_like(pairs)
    for axis in (0, 1):
        counts = np.cumsum(
            pairs, axis=axis
        )  # at a pair: 1 at the first, all at the last
        outer |= pairs & ((counts == 1) | (counts == counts.max(axis, keepdims=True)))
    best = float(found.theta[SHAPE_U])
    low, high = min(float(ends[0].min()), best), max(float(ends[2].max()), best)
    return theta[:, outer[pairs]].reshape(-1, 4), {
        A: _widened(ASYMPTOTES, rows),
        SHAPE_U: Interval(
            low if low > LOG_EXPONENTS[0] else None,
            high if high < LOG_EXPONENTS[-1] else None,
        ),
        SHAPE_V: _widened(np.log(MIDPOINTS / curve.x[-1]), columns),
    }


def _widened(grid: Array, places: np.ndarray) -> Interval:
    """Return a grid's interval from first to last index, half a step wider each way."""
    first, last = int(places.min()), int(places.max())
    return Interval(
        None if first == 0 else float(grid[first - 1 : first + 1].mean()),
        None if last == len(grid) - 1 else float(grid[last : last + 2].mean()),
    )


def _at_ends(found: GridSearch) -> tuple[str, ...]:
    """Warn of a winner at the end of a grid."""
    asymptote, midpoint = found.values["asymptote"], found.values["midpoint"]
    warnings = []
    if asymptote in ASYMPTOTES[[0, -1]]:
        warnings.append(
            f"A = {asymptote:g} is at the end of the paper's grid, "
            f"{ASYMPTOTES[0]:g} to {ASYMPTOTES[-1]:g}: the best A may lie beyond"
        )
    if midpoint in MIDPOINTS[[0, -1]]:
        warnings.append(f"C_mid = {midpoint:g} is at the end of the paper's grid")
    return tuple(warnings)
