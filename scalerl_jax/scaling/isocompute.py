"""IsoCompute: the best rollouts per prompt for a budget, from a sweep of runs.

The procedure of https://arxiv.org/abs/2603.12151: record-breaking points of each run,
a monotone sigmoid per run, the upper envelope of the fitted curves, n*(C) where each
curve attains it, a running average, and a sigmoid of log2 n* in log C.  Compute is in
rollouts, C = B_p * n * M (prompts per step, rollouts per prompt, steps).

The curve of a run counts from its first evaluation on, and behind its last one keeps
its height there: if it were left out, the n whose runs were longest would win whatever
it does.  A run with too few records, such as one that climbs to its plateau within a
few bins, is fitted to all of its points.

The paper gives no bin width.  Running maxima of noisy evaluations flatter early points;
bins wider than the noise reduce that.  There are no intervals: the running average and
the sigmoid through a staircase err by more than a refit of resampled runs shows.
Simulated sweeps measure how often the decision is right (`DECISION`).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from scalerl_jax.scaling.fit import fit_curve
from scalerl_jax.scaling.identifiability import USUAL_REACH
from scalerl_jax.scaling.laws import SIGMOID
from scalerl_jax.scaling.records import (
    Array,
    CurveError,
    Places,
    Record,
    make_curve,
)
from scalerl_jax.scaling.result import Fit, Settings
from scalerl_jax.scaling.search import Grid, Problem, minimise

COMPUTE_NAME = "rollouts"
GRID_POINTS = 96
AVERAGED_SHARE = 0.1  # of the grid, in the running average of log2 n*
# Measured on simulated sweeps (`benchmarks/scaling.py --only=isocompute`).
DECISION = (
    "n* has no interval; in simulated sweeps of five n, the tested n nearest to it was "
    "the best at 90 % of budgets with noise 0.004, and 74 % with 0.01, else next to it"
)
STILL_RISING = "n*(C) still rises where the data end: n_high is not identified"
MIN_POINTS = 5  # four parameters and one more


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One run of the sweep."""

    rollouts_per_prompt: int  # n
    prompts_per_step: int  # B_p
    compute: ArrayLike  # [m] rollouts spent, increasing
    reward: ArrayLike  # [m] on held-out prompts, in [0, 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation(Record):
    """Split of a budget of rollouts."""

    budget: float  # rollouts
    rollouts_per_prompt: int  # n: n*(budget) to the nearest power of two
    optimal: float  # n*(budget) itself
    prompts_per_step: int  # B_p: the smallest stable one
    steps: int  # M: what is left
    reward: float  # of the frontier at the budget
    beyond_data: bool  # one of the tested n has no run of this budget


@dataclasses.dataclass(frozen=True, kw_only=True)
class IsoCompute(Record):
    """n*(C) of a sweep.

    log2 n*(C) = low + (high - low) / (1 + (C0 / C)^k)
    """

    bin_width: float
    records_only: bool
    tested: list[int]  # values of n
    parameters: dict[str, float]  # n_low, n_high, k, C0 in rollouts
    decision: str = DECISION  # how often it is right
    converged: bool
    saturated: bool  # the data reach 2.4 C0, so that n_high can be believed
    warnings: tuple[str, ...]
    smallest_prompts: int  # least B_p of the runs on the frontier
    shared_end: float  # rollouts up to which every tested n has a run
    grid: Array = dataclasses.field(repr=False)  # [g] rollouts
    fits: list[Fit] = dataclasses.field(repr=False)  # of the runs used
    theta: Array = dataclasses.field(repr=False)  # [4] of the final sigmoid

    def optimal(self, compute: ArrayLike) -> Array:
        """Return n*(C) at compute in rollouts."""
        t = np.log(np.atleast_1d(np.asarray(compute, np.float64)) / self.grid[-1])
        rates = SIGMOID.rates(self.theta[None], t)[0]
        return _rollouts(rates, self.tested).reshape(np.shape(compute))

    def allocate(
        self, budget: float, *, prompts_per_step: int | None = None
    ) -> Allocation:
        """Split a budget: n by n*(C), the smallest stable B_p, the rest in M.

        Args:
            budget: rollouts.
            prompts_per_step: smallest B_p that trains stably; by default that of the
                runs on the frontier.
        """
        if not 0 < budget < math.inf:
            raise CurveError(f"budget = {budget:g}; give a number of rollouts above 0")
        best = float(self.optimal(budget))
        n = int(2 ** round(math.log2(best)))
        prompts = prompts_per_step or self.smallest_prompts
        steps = int(budget // (n * prompts))
        if steps < 1:
            raise CurveError(
                f"budget = {budget:g} rollouts do not pay one step of {prompts} "
                f"prompts with {n} rollouts each; give a larger budget or a smaller "
                "prompts_per_step"
            )
        return Allocation(
            budget=float(budget),
            rollouts_per_prompt=n,
            optimal=best,
            prompts_per_step=prompts,
            steps=steps,
            reward=max(float(fit.predict(budget)) for fit in self.fits),
            beyond_data=bool(budget > self.shared_end),
        )


def record_points(reward: ArrayLike, bin_width: float) -> Places:
    """Return the indices of points that reach a higher bin of rewards than all before.

    With bin_width 0, every point above all earlier ones.
    """
    rewards = np.asarray(reward, np.float64)
    if bin_width < 0:
        raise CurveError(f"bin_width = {bin_width:g}; give a number of at least 0")
    # 1e-9: 0.3 / 0.1 is a little below 3.
    bins = np.floor(rewards / bin_width + 1e-9) if bin_width > 0 else rewards
    before = np.concatenate([[-np.inf], np.maximum.accumulate(bins)[:-1]])
    return np.flatnonzero(bins > before)


def fit_isocompute(
    runs: Sequence[SweepRun],
    *,
    bin_width: float = 0.02,
    records_only: bool = True,
) -> IsoCompute:
    """Fit n*(C) to a sweep over rollouts per prompt.

    Args:
        runs: of at least two values of n.
        bin_width: of the reward bins; wider than the noise of one evaluation.
        records_only: fit each run's record-breaking points, as in the paper; otherwise
            all of its points, which the paper finds to give the same curve.
    """
    fits, kept, warnings = _fit_runs(runs, bin_width, records_only)
    tested = _tested(runs, kept, warnings)
    n = np.array([run.rollouts_per_prompt for run in kept])
    warnings += _uneven(n, tested)
    ranges = np.array([_range(run) for run in kept])
    last = ranges[:, 1].max()
    shared_end = min(ranges[n == each, 1].max() for each in tested)
    grid = np.geomspace(ranges[:, 0].min(), last, GRID_POINTS)
    best = _frontier(fits, ranges, grid)
    heights = _heights(n[best], tested)
    t, weights = np.log(grid / last), np.ones(grid.size)
    problem = Problem(law=SIGMOID, t=t, y=heights[None], weights=weights)
    theta, _, converged = minimise(problem, Grid(problem))
    found = _named(theta[None], tested, last)
    saturated = last >= USUAL_REACH * float(found["C0"][0])
    warnings += [] if saturated else [STILL_RISING]
    return IsoCompute(
        bin_width=bin_width,
        records_only=records_only,
        tested=tested,
        parameters={name: float(value[0]) for name, value in found.items()},
        converged=converged,
        saturated=saturated,
        warnings=tuple(warnings),
        smallest_prompts=min(kept[i].prompts_per_step for i in best),
        shared_end=float(shared_end),
        grid=grid,
        fits=fits,
        theta=theta,
    )


def _range(run: SweepRun) -> tuple[float, float]:
    """Return the compute of a run's first evaluation above 0, and of its last."""
    compute = np.asarray(run.compute, np.float64)
    return compute[compute > 0].min(), compute.max()


def _tested(
    runs: Sequence[SweepRun], kept: Sequence[SweepRun], warnings: list[str]
) -> list[int]:
    """Return the tested values of n.

    Raises:
        CurveError: there are fewer than two, or no run of one of them is kept.
    """
    tested = sorted({run.rollouts_per_prompt for run in kept})
    lost = sorted({run.rollouts_per_prompt for run in runs} - set(tested))
    if lost and len(tested) > 1:
        raise CurveError(
            f"no run with rollouts_per_prompt = {lost[0]} can be fitted, without which "
            f"another n would be the best in its place; {warnings[0]}; leave its runs "
            f"out of the table, or evaluate them more often"
        )
    if len(tested) < 2:
        raise CurveError(
            f"runs with rollouts_per_prompt = {tested} could be fitted; n*(C) needs at "
            f"least two values{'; ' + warnings[0] if warnings else ''}"
        )
    return tested


def _uneven(n: np.ndarray, tested: list[int]) -> list[str]:
    """Return a warning if one n has more runs than another.

    The highest of several equal curves is higher than one of them.
    """
    counts = [int((n == each).sum()) for each in tested]
    most, least = np.argmax(counts), np.argmin(counts)
    if counts[most] == counts[least]:
        return []
    return [
        f"n = {tested[most]} has {counts[most]} runs and n = {tested[least]} has "
        f"{counts[least]}: the best of more runs is higher by chance; give every n as "
        f"many"
    ]


def _fit_runs(
    runs: Sequence[SweepRun], bin_width: float, records_only: bool
) -> tuple[list[Fit], list[SweepRun], list[str]]:
    """Fit a monotone sigmoid per run; runs that cannot be fitted are named."""
    fits, kept, warnings = [], [], []
    for run in runs:
        x, y = np.asarray(run.compute, np.float64), np.asarray(run.reward, np.float64)
        name = f"n = {run.rollouts_per_prompt}, B_p = {run.prompts_per_step}"
        try:
            curve = make_curve(x, y, names=(COMPUTE_NAME, "reward"), name=name)
            if records_only:
                places = record_points(curve.y, bin_width)
                if places.size >= MIN_POINTS:
                    curve = dataclasses.replace(
                        curve, x=curve.x[places], y=curve.y[places]
                    )
            fit = fit_curve(curve, Settings(initial_reward="free"))
            if not fit.climbs:
                raise CurveError(str(fit.reason))
        except CurveError as failure:
            warnings.append(f"left out the run {name}: {failure}")
            continue
        fits.append(fit)
        kept.append(run)
    if not fits:
        raise CurveError("no run could be fitted: " + "; ".join(warnings))
    return fits, kept, warnings


def _frontier(fits: Sequence[Fit], ranges: Array, grid: Array) -> Places:
    """Return the run whose curve is highest at each grid point, as an index: [g].

    A curve counts from the start of its run on; `ranges` has their ends, [fits, 2].
    """
    curves = [
        np.where(
            grid >= first * (1 - 1e-9), fit.predict(np.minimum(grid, last)), -np.inf
        )
        for fit, (first, last) in zip(fits, ranges, strict=True)
    ]
    return np.argmax(curves, axis=0)


def _heights(n: Array, tested: list[int]) -> Array:
    """Return log2 n, scaled to [0, 1] over the tested n and smoothed: [g]."""
    low, high = np.log2(tested[0]), np.log2(tested[-1])
    heights = (np.log2(n) - low) / (high - low)
    width = 2 * int(AVERAGED_SHARE * GRID_POINTS / 2) + 1
    padded = np.pad(heights, width // 2, mode="edge")
    return np.lib.stride_tricks.sliding_window_view(padded, width).mean(axis=1)


def _rollouts(heights: Array, tested: list[int]) -> Array:
    """Return n of heights: 0 is the least n tested and 1 the largest."""
    low, high = np.log2(tested[0]), np.log2(tested[-1])
    return 2.0 ** (low + (high - low) * heights)


def _named(theta: Array, tested: list[int], last: float) -> dict[str, Array]:
    """Return the sigmoid's parameters of rows theta [K, 4], by name."""
    return {
        "n_low": _rollouts(theta[:, 0], tested),
        "n_high": _rollouts(theta[:, 1], tested),
        "k": np.exp(theta[:, 2]),
        "C0": np.exp(theta[:, 3]) * last,
    }
