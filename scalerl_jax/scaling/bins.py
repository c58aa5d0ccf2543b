"""Very long curves: a fit sees neighbouring evaluations as their means.

    sum_i w_i (y_i - R(x_i))^2  =  sum_b W_b (mean_b y - R(x_b))^2  +  within

for bins b of points with the same R, whose weights w add up to W_b; `within` is the
same for all curves R.  A fit evaluates every point some hundreds of times.  Above
MOST_POINTS it uses the mean of each bin instead, whose points are so close to each
other that no curve here tells them apart (`benchmarks/long_runs.py --only=binning`).

Everything that needs single evaluations or their order uses all of them
(`Problem.points`): the noise, the correlation of neighbours, the tests for a climb and
for a fall, and the blocks of the bootstrap.  Huber's loss does too, as a mean would
hide a bad evaluation from it.
"""

import dataclasses

import numpy as np

from scalerl_jax.scaling.records import Array, Places
from scalerl_jax.scaling.search import Problem

MOST_POINTS = 1000  # points of an unbinned curve, and bins of a binned one
NUM_CELLS = MOST_POINTS // 2  # cells of equal width in log x, and of equal point counts
ROWS_AT_ONCE = 64  # resampled curves that are binned together, to bound memory


def bin_starts(log_x: Array) -> Places:
    """Return the index of each bin's first point, for increasing log x [n], n > 1.

    A bin ends where a cell of either kind ends, so it spans at most 1 / NUM_CELLS of
    the range of log x and of the points.
    """
    places, reach = np.arange(log_x.size), log_x - log_x[0]
    by_x = np.minimum((reach * (NUM_CELLS / reach[-1])).astype(int), NUM_CELLS - 1)
    by_count = places * NUM_CELLS // log_x.size
    ends = np.diff(by_x) + np.diff(by_count) > 0
    return np.append(0, np.flatnonzero(ends) + 1)


def bin_points(problem: Problem) -> Problem:
    """Return a problem of bins; the problem itself if its points are few enough."""
    if problem.t.size <= MOST_POINTS:
        return problem
    starts = _starts(problem)
    weights = np.add.reduceat(problem.weights, starts)
    return dataclasses.replace(
        problem,
        t=np.add.reduceat(problem.t * problem.weights, starts) / weights,
        y=_means(problem, problem.y, starts),
        weights=weights,
        whole=problem,
    )


def bin_rates(problem: Problem, rates: Array) -> Array:
    """Return the bin means [K, m] of pass rates [K, n] at a problem's points."""
    if problem.whole is None:
        return rates
    starts = _starts(problem.whole)
    parts = range(0, len(rates), ROWS_AT_ONCE)
    return np.concatenate(
        [_means(problem.whole, rates[i : i + ROWS_AT_ONCE], starts) for i in parts]
    )


def widest_bin(problem: Problem) -> float:
    """Return the largest relative growth of x within a bin of a binned problem."""
    assert problem.whole is not None, "it is binned"
    starts, t = _starts(problem.whole), problem.whole.t
    return float(np.expm1((t[np.append(starts[1:], t.size) - 1] - t[starts]).max()))


def _starts(problem: Problem) -> Places:
    """Return the index of each bin's first point; step 0 is a bin of its own."""
    first = int(problem.observes_zero)
    return np.append(np.zeros(first, int), bin_starts(problem.t[first:]) + first)


def _means(problem: Problem, rates: Array, starts: Places) -> Array:
    """Return the weighted means [K, m] of rates [K, n] in each bin."""
    weights = problem.weights
    sums = np.add.reduceat(rates * weights, starts, axis=1)
    return sums / np.add.reduceat(weights, starts)
