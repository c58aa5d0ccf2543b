"""Right and wrong winners of whole studies: a part of `scaling.py`.

Studies have four arms; the others are compared with the first one and share the error.
Three tests are compared on the same runs: the spread between runs taken from the two
arms that are compared; from all arms, as the package does; and REML, a hierarchical fit
of all runs with effects of a run on A and on C_mid, where R0 and B are the arm's.  The
curves are those of `scaling_compare.py`.
"""

import itertools
from types import SimpleNamespace

import numpy as np
from scaling_compare import EXPONENT, SHARED, SLOW, Fits, X, rates_of_runs

from scalerl_jax.scaling.compare import choose
from scalerl_jax.scaling.differences import RUN_SD, RecipeSample, difference
from scalerl_jax.scaling.estimate import correlation_growth
from scalerl_jax.scaling.identifiability import ASYMPTOTE_MARGIN
from scalerl_jax.scaling.power import power_of
from scalerl_jax.scaling.search import SHAPE_U, SHAPE_V, A, descend
from scalerl_jax.scaling.uncertainty import student_quantile

NUM_ARMS, MOST_SEEDS = 4, 8
SEEDS = (2, 3, 5, 8)
SPREADS = (0.0, 0.01, 0.03)  # of A; log C_mid, and log B, spread 3 times as far
GAPS = (0.02, 0.04)  # of A in the second and third arm; the fourth has a lower B
LEVEL = 0.9  # of the study's verdicts
PAIR_LEVEL = 1.0 - (1.0 - LEVEL) / (NUM_ARMS - 1)
EACH = 1.0 - 0.5 * (1.0 - PAIR_LEVEL)  # of A's interval and of B's
# Spreads of A by arm, where they are not alike.
UNLIKE = (
    (0.03, 0.01, 0.01, 0.01),
    (0.01, 0.03, 0.01, 0.01),
    (0.03, 0.03, 0.01, 0.01),
    (0.01, 0.03, 0.03, 0.03),
    (0.003, 0.01, 0.02, 0.03),
)
# Standard deviations of the effects of runs that REML chooses from.
EFFECTS = np.array(
    list(
        itertools.product(
            [0.0, *np.geomspace(0.002, 0.06, 8)], [0.0, *np.geomspace(0.01, 0.2, 7)]
        )
    )
)


def studies(num_curves, table):
    """Print false winners of whole studies, intervals and power, of three tests."""
    count = num_curves
    print(f"### Studies of {NUM_ARMS} arms at 90 %, {count} studies a cell, in %\n")
    print("Two arms alone / all arms (the package's test) / REML\n")
    for shared, correlation in itertools.product((0.0, SHARED), (0.0, 0.5)):
        noise = f"AR(1) {correlation}" if correlation else "independent"
        print(f"Noise {noise}; {'paired' if shared else 'unpaired'}\n")
        rows = [_head("spread")]
        for spread in SPREADS:
            sets = _sets(count, [spread] * NUM_ARMS, correlation, shared)
            for runs in SEEDS:
                rows.append((spread, runs, *_cells(sets, runs, paired=shared > 0)))
        table(*rows)
    print("B is the same in all runs of an arm; noise independent, unpaired\n")
    rows = [_head("spread")]
    for spread in SPREADS[1:]:
        sets = _sets(count, [spread] * NUM_ARMS, 0.0, 0.0, exponents_spread=0.0)
        for runs in SEEDS[:3]:
            rows.append((spread, runs, *_cells(sets, runs, paired=False)))
    table(*rows)
    print("Arms that spread differently; noise independent\n")
    rows = [_head("spreads")]
    for spreads, shared in itertools.product(UNLIKE, (0.0, SHARED)):
        sets = _sets(count, spreads, 0.0, shared)
        name = f"{', '.join(map(str, spreads))}; {'paired' if shared else 'unpaired'}"
        for runs in SEEDS[:3]:
            rows.append((name, runs, *_cells(sets, runs, paired=shared > 0)))
    table(*rows)
    foretold(count, table)


def _head(first):
    return (
        *(first, "runs each", "false winner in a study", "90 % interval of A holds"),
        *(f"A by {gap} found" for gap in GAPS),
        *(f"B {EXPONENT} against {SLOW} found", "the wrong one"),
    )


def _sets(count, spreads, correlation, shared, exponents_spread=3.0):
    """Return fits of studies with equal arms, and of those that differ."""
    seed = [*(round(1000 * each) for each in spreads), round(10 * correlation)]
    generator = np.random.default_rng([*seed, round(10 * shared), len(spreads)])
    alike = np.zeros(len(spreads)), np.full(len(spreads), EXPONENT)
    gaps, exponents = (each.copy() for each in alike)
    gaps[1:3] = np.negative(GAPS)
    exponents[3] = SLOW
    return {
        name: Fits(
            rates_of_runs(
                generator,
                (count, len(spreads), MOST_SEEDS),
                np.array(spreads),
                arms,
                correlation=correlation,
                shared=shared,
                exponents_spread=exponents_spread,
            )
        )
        for name, arms in {"equal": alike, "differ": (gaps, exponents)}.items()
    }


def _errors(problem, theta, free):
    """Return covariances [.., k, k] of the free columns of fits, by their residuals."""
    slopes = problem.slopes(theta)[:, :, free]
    covariance = np.linalg.pinv(np.einsum("kni,knj->kij", slopes, slopes))
    z = problem.scaled_residuals(theta)
    squares = (z**2).sum(axis=1)
    rho = (z[:, 1:] * z[:, :-1]).sum(axis=1) / squares
    growth = np.array([correlation_growth(each, X.size, len(free)) for each in rho])
    return covariance * (squares / (X.size - len(free)) * growth)[:, None, None]


def _exponents(fits, runs, held_at):
    """Return log B [count, arms, runs] with A held at `held_at`, and its error."""
    places = np.arange(np.prod(fits.shape)).reshape(fits.shape)[:, :, :runs].ravel()
    start = fits.theta[places]
    shape = (*fits.shape[:2], runs)
    start[:, A] = held_at.ravel()
    held = np.zeros(start.shape, bool)
    held[:, A] = True
    problem = fits.problem.curves(places)
    theta = descend(problem, start, tolerance=1e-9, held=held)[0]
    covariance = _errors(problem, theta, [0, 2, 3])
    errors = np.sqrt(covariance[:, 1, 1])
    return theta[:, SHAPE_U].reshape(shape), errors.reshape(shape)


def _cells(sets, runs, *, paired):
    """Return one row: the figures of each test, "-" if it was not tried."""
    found = {name: _tested(fits, runs, paired=paired) for name, fits in sets.items()}
    cells = []
    for test in found["equal"]:
        equal, differ = (found[name][test] for name in ("equal", "differ"))
        signs, other = np.array(equal.signs), np.array(differ.signs)
        cells.append(
            (
                np.mean((signs != 0).any(axis=1)),
                np.mean(equal.held),
                *(np.mean(other[:, arm] > 0) for arm in range(3)),
                np.mean(other[:, 2] < 0),
            )
        )
    return [
        " / ".join(f"{100 * share:.1f}" for share in shares)
        for shares in zip(*cells, strict=True)
    ]


def _tested(fits, runs, *, paired):
    """Return signs [count, arms - 1] of winners, and if A's intervals contain 0."""
    a = fits.theta[:, A].reshape(fits.shape)[:, :, :runs]
    every = np.arange(len(fits.theta)).reshape(fits.shape)[:, :, :runs].ravel()
    problem, theta = fits.problem.curves(every), fits.theta[every]
    covariances = _errors(problem, theta, [0, 1, 2, 3]).reshape(*a.shape, 4, 4)
    errors = np.sqrt(covariances[..., A, A])
    means = np.broadcast_to(a.mean(axis=2, keepdims=True), a.shape)
    own = _exponents(fits, runs, means)[0]
    tests = {"two arms": (), "all arms": range(fits.shape[1])}
    found = {name: SimpleNamespace(signs=[], held=[]) for name in tests}
    for arm in range(1, fits.shape[1]):
        shared = means[:, [0, arm]].mean(axis=1, keepdims=True)
        b, b_errors = _exponents(fits, runs, np.broadcast_to(shared, a.shape))
        for name, pool in tests.items():
            signs, held = [], []
            for study in range(fits.shape[0]):
                rest = [other for other in pool if other not in (0, arm)]
                by_a, by_b = (
                    _difference(
                        values[study, [0, arm]],
                        reach[study, [0, arm]],
                        [whole[study, other] for other in rest],
                        EACH,
                        paired=paired,
                    )
                    for values, reach, whole in ((a, errors, a), (b, b_errors, own))
                )
                signs.append(choose(by_a, by_b, by_a, margin=ASYMPTOTE_MARGIN)[0])
                at_90 = _difference(
                    a[study, [0, arm]],
                    errors[study, [0, arm]],
                    [a[study, other] for other in rest],
                    LEVEL,
                    paired=paired,
                )
                held.append(at_90.sign == 0)
            found[name].signs.append(signs)
            found[name].held.append(held)
    if not paired:
        found["REML"] = _reml(
            fits.theta.reshape(*fits.shape, 4)[:, :, :runs], covariances
        )
    return {
        name: SimpleNamespace(signs=np.transpose(each.signs), held=each.held)
        for name, each in found.items()
    }


def _difference(values, errors, others, level, *, paired):
    """Return the package's interval of a difference of two arms [2, runs]."""
    reach = student_quantile(level, X.size - 4) * errors
    samples = [RecipeSample(v, np.c_[r, r]) for v, r in zip(values, reach, strict=True)]
    return difference(
        *samples, level=level, run_sd=RUN_SD, paired=paired, others=others
    )


def _reml(theta, covariances):
    """Fit all runs of a study at once, with effects of a run on A and on C_mid.

    theta_run = arm + effect + error, where the errors' covariances are those of the
    fits; the spreads of the effects are common to all arms and maximise the restricted
    likelihood on a grid.  Student's t has runs - arms degrees of freedom.
    """
    count, num_arms, runs = theta.shape[:3]
    best = np.full(count, -np.inf)
    means, errors = np.zeros((count, num_arms, 4)), np.zeros((count, num_arms, 4, 4))
    tiny = 1e-10 * np.eye(4)
    for of_a, of_c in EFFECTS:
        effect = tiny.copy()
        effect[A, A] += of_a**2
        effect[SHAPE_V, SHAPE_V] += of_c**2
        precision = np.linalg.inv(covariances + effect)
        whole = precision.sum(axis=2)
        error = np.linalg.inv(whole)
        mean = np.einsum("saij,sarjk,sark->sai", error, precision, theta)
        apart = theta - mean[:, :, None]
        likelihood = 0.5 * np.linalg.slogdet(precision)[1].sum(axis=(1, 2))
        likelihood -= 0.5 * np.linalg.slogdet(whole)[1].sum(axis=1)
        likelihood -= 0.5 * np.einsum("sari,sarij,sarj->s", apart, precision, apart)
        better = likelihood > best
        best[better] = likelihood[better]
        means[better], errors[better] = mean[better], error[better]
    degrees = num_arms * (runs - 1)
    found = SimpleNamespace(signs=[], held=[])
    for arm in range(1, num_arms):
        gap, error = means[:, 0] - means[:, arm], errors[:, 0] + errors[:, arm]
        t_a = gap[:, A] / np.sqrt(error[:, A, A])
        pull = error[:, SHAPE_U, A] / error[:, A, A]
        b = gap[:, SHAPE_U] - pull * gap[:, A]  # with A the same in both
        t_b = b / np.sqrt(error[:, SHAPE_U, SHAPE_U] - pull * error[:, SHAPE_U, A])
        bound = student_quantile(EACH, degrees)
        by_a = np.where(np.abs(t_a) > bound, np.sign(t_a), 0.0)
        by_b = np.where(np.abs(t_b) > bound, np.sign(t_b), 0.0)
        near = np.abs(gap[:, A]) <= ASYMPTOTE_MARGIN
        found.signs.append(np.where((by_a == 0) & near, by_b, by_a))
        found.held.append(np.abs(t_a) <= student_quantile(LEVEL, degrees))
    return found


def foretold(count, table):
    """Print the power by `power.py` of the package's test by A, beside the measured."""
    print("Power by A alone at the level of the study, foretold and found\n")
    rows = [("spread", "runs each", *(f"A by {gap}" for gap in GAPS))]
    for spread in SPREADS[1:]:
        fits = _sets(count, [spread] * NUM_ARMS, 0.0, 0.0)["differ"]
        for runs in SEEDS:
            a = fits.theta[:, A].reshape(fits.shape)[:, :, :runs]
            run_sd = float(np.sqrt(a.var(axis=2, ddof=1).mean()))
            cells = []
            for arm, gap in enumerate(GAPS, 1):
                samples = [
                    _difference(
                        each[[0, arm]],
                        np.zeros((2, runs)),
                        [each[other] for other in range(1, NUM_ARMS) if other != arm],
                        EACH,
                        paired=False,
                    )
                    for each in a
                ]
                power = power_of(gap, run_sd, runs, level=EACH, recipes=NUM_ARMS)
                share = np.mean([each.sign > 0 for each in samples])
                cells.append(f"{100 * power:.1f}, {100 * share:.1f}")
            rows.append((spread, runs, *cells))
    table(*rows)


PARTS = {"studies": studies}
