"""Rate at which `compare` names a winner of equal recipes: a part of `scaling.py`.

Every simulated run has its own A, B and C_mid, drawn around those of its recipe, and
evaluations with independent noise.  Thousands of curves are fitted at once, with the
standard errors of least squares in place of profiles; the intervals of differences and
the winners are those of the package.
"""

import itertools

import numpy as np

from scalerl_jax import scaling
from scalerl_jax.scaling.compare import choose
from scalerl_jax.scaling.differences import RUN_SD, RecipeSample, difference
from scalerl_jax.scaling.estimate import correlation_growth
from scalerl_jax.scaling.identifiability import ASYMPTOTE_MARGIN
from scalerl_jax.scaling.laws import SIGMOID
from scalerl_jax.scaling.obstacles import FEWEST_RUNS
from scalerl_jax.scaling.search import SHAPE_U, A, Problem, descend, minimise_each
from scalerl_jax.scaling.uncertainty import student_quantile

R0, ASYMPTOTE, EXPONENT = 0.25, 0.61, 1.92
SLOW = 1.4  # B of the second recipe, where only B differs
X = np.linspace(0.0, 6.3, 33)  # in C_mid: step 0, and 32 evaluations
NOISE = 0.01
SPREADS = (0.0, 0.01, 0.03)  # of A; log B and log C_mid spread 3 times as far
SEEDS = (1, 2, 3, 5)  # runs of each recipe
SHARED = 0.5  # correlation of runs of one seed
EACH = 0.95  # level of A's interval and of B's, for a verdict at 90 %
GAPS = (0.03, 0.05)  # in A
# Spreads of A in the two recipes, and runs of each, that are not alike.
UNLIKE = (
    *(((0.03, 0.0), (count, count)) for count in (2, 3, 5)),
    ((0.01, 0.01), (5, 2)),
    ((0.0, 0.03), (5, 2)),
    ((0.03, 0.0), (5, 2)),
)


def compare(num_curves, table):
    """Print false winners of equal recipes, coverage of intervals, and power."""
    count = 4 * num_curves
    print(f"### `compare` at 90 %, {count} pairs of recipes a cell, in %\n")
    for shared, correlation in itertools.product((0.0, SHARED), (0.0, 0.5)):
        noise = f"AR(1) {correlation}" if correlation else "independent"
        pairing = "paired" if shared else "unpaired"
        print(f"Noise {noise}; {pairing}\n")
        rows = [_head("spread")]
        for spread in SPREADS:
            sets = _sets(count, (spread, spread), correlation, shared)
            for runs in SEEDS[int(shared > 0) :]:
                cells = _cells(sets, (runs, runs), paired=shared > 0)
                rows.append((spread, runs, *cells))
        table(*rows)
    print("Recipes whose runs spread differently, or are not as many; unpaired\n")
    rows = [_head("spreads")]
    for spreads, runs in UNLIKE:
        cells = _cells(_sets(count, spreads, 0.0, 0.0), runs, paired=False)
        shown = (" and ".join(map(str, each)) for each in (spreads, runs))
        rows.append((*shown, *cells))
    table(*rows)


def _head(first):
    gaps = (f"A by {gap} found" for gap in GAPS)
    intervals = ("interval of A holds", "of B holds")
    slow = f"B {EXPONENT} against {SLOW}"
    named = (*intervals, *gaps, f"{slow} found", "the wrong one")
    return (first, "runs each", "false winner", *named)


def _sets(count, spreads, correlation, shared):
    """Return fits of pairs of equal recipes, and of different ones by difference."""
    seed = [round(1000 * (spreads[0] + 2 * spreads[1])), round(10 * correlation)]
    generator = np.random.default_rng([*seed, round(10 * shared)])
    differ = {"equal": (0.0, EXPONENT), "slow": (0.0, SLOW)}
    differ |= {gap: (gap, EXPONENT) for gap in GAPS}
    return {
        name: Fits(
            rates_of_runs(
                generator,
                (count, 2, max(SEEDS)),
                np.array(spreads),
                (np.array([gap, 0.0]), np.array([EXPONENT, exponent])),
                correlation=correlation,
                shared=shared,
            )
        )
        for name, (gap, exponent) in differ.items()
    }


def rates_of_runs(
    generator, shape, spreads, arms, *, correlation, shared, exponents_spread=3.0
):
    """Return pass rates [count, arms, seeds, n]; runs of a seed share part of the luck.

    `shape` is (count, arms, seeds); `arms` has each arm's addition to A, and its B.
    """
    count, num_arms, seeds = shape
    common = generator.normal(size=(3, count, 1, seeds, 1))
    luck = np.sqrt(1.0 - shared) * generator.normal(size=(3, *shape, 1))
    luck = (luck + np.sqrt(shared) * common) * spreads.reshape(num_arms, 1, 1)
    gaps, exponents = (each.reshape(num_arms, 1, 1) for each in arms)
    asymptotes = ASYMPTOTE + gaps + luck[0]
    exponents = exponents * np.exp(exponents_spread * luck[1])
    reach = X**exponents
    share = reach / (reach + np.exp(3.0 * luck[2]) ** exponents)
    noise = generator.normal(0.0, NOISE, share.shape)
    for i in range(1, X.size):
        fresh = np.sqrt(1.0 - correlation**2) * noise[..., i]
        noise[..., i] = correlation * noise[..., i - 1] + fresh
    return np.clip(R0 + (asymptotes - R0) * share + noise, 0.0, 1.0)


class Fits:
    """Fits of many curves on one compute."""

    def __init__(self, rates):
        """Fit the curves of rates [count, 2, runs, n]."""
        self.shape = rates.shape[:-1]
        truth = {"initial_reward": R0, "asymptote": ASYMPTOTE, "exponent": EXPONENT}
        one = scaling.fit(X, scaling.sigmoid(X, midpoint=1.0, **truth))
        y, like = rates.reshape(-1, X.size), one.problem
        self.problem = Problem(law=SIGMOID, t=like.t, y=y, weights=like.weights)
        self.theta = minimise_each(self.problem, one.theta)[0]
        self.asymptotes = _number(self.problem, self.theta, A, [0, 1, 2, 3], self.shape)

    def exponents(self, counts):
        """Return log B of the first runs, with A held at the mean of both recipes."""
        values = self.asymptotes[0]
        first = np.zeros(self.shape, bool)
        means = []
        for recipe, count in enumerate(counts):
            first[:, recipe, :count] = True
            means.append(values[:, recipe, :count].mean(axis=1))
        places = np.flatnonzero(first)
        shared = np.broadcast_to(np.mean(means, axis=0)[:, None, None], self.shape)
        start = self.theta[places]
        start[:, A] = shared.ravel()[places]
        held = np.zeros(start.shape, bool)
        held[:, A] = True
        problem = self.problem.curves(places)
        theta = descend(problem, start, tolerance=1e-9, held=held)[0]
        found = np.full(self.shape, np.nan), np.full((*self.shape, 2), np.nan)
        for whole, part in zip(
            found, _number(problem, theta, SHAPE_U, [0, 2, 3], (-1,)), strict=True
        ):
            whole[first] = part
        return found


def _number(problem, theta, column, free, shape):
    """Return a column's values in this shape, and the reach [.., 2] of their noise."""
    slopes = problem.slopes(theta)[:, :, free]
    covariance = np.linalg.pinv(np.einsum("kni,knj->kij", slopes, slopes))
    z = problem.scaled_residuals(theta)
    squares, spare = (z**2).sum(axis=1), X.size - len(free)
    rho = (z[:, 1:] * z[:, :-1]).sum(axis=1) / squares
    growth = np.array([correlation_growth(each, X.size, len(free)) for each in rho])
    place = free.index(column)
    error = np.sqrt(covariance[:, place, place] * squares / spare * growth)
    reach = student_quantile(EACH, spare) * error
    return theta[:, column].reshape(shape), np.c_[reach, reach].reshape(*shape, 2)


def decide(fits, counts, *, paired):
    """Return A's difference, B's (None for one run each), the winner (1, -1, 0)."""
    several = max(counts) > 1
    numbers = [fits.asymptotes, *([fits.exponents(counts)] if several else [])]
    found = []
    for pair in range(fits.shape[0]):
        differences = []
        for values, reach in numbers:
            samples = [
                RecipeSample(values[pair, recipe, :count], reach[pair, recipe, :count])
                for recipe, count in enumerate(counts)
            ]
            differences.append(
                difference(*samples, level=EACH, run_sd=RUN_SD, paired=paired)
            )
        by_a, by_b = (*differences, None)[:2]
        sign, _ = choose(by_a, by_b, by_a, margin=ASYMPTOTE_MARGIN)
        found.append((by_a, by_b, sign if min(counts) >= FEWEST_RUNS else 0))
    return found


def _cells(sets, counts, *, paired):
    """Return the figures of one row."""
    found = {name: decide(fits, counts, paired=paired) for name, fits in sets.items()}
    signs = {name: np.array([s for *_, s in each]) for name, each in found.items()}
    by_a, by_b, _ = zip(*found["equal"], strict=True)
    held = [each.sign == 0 for each in by_b if each is not None]
    shares = [
        np.mean(signs["equal"] != 0),
        np.mean([each.sign == 0 for each in by_a]),
        np.mean(held) if held else None,
        *(np.mean(signs[gap] > 0) for gap in GAPS),
        np.mean(signs["slow"] > 0),
        np.mean(signs["slow"] < 0),
    ]
    return ["-" if share is None else f"{100 * share:.1f}" for share in shares]


PARTS = {"compare": compare}
