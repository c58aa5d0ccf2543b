"""Cells in which the fitter's claims are hardest to keep: parts of `scaling.py`.

Curves without a plateau, noise that is not independent and normal, and IsoCompute.
"""

import numpy as np
from scaling_claims import TRUTH, curve_rate

from scalerl_jax import scaling
from scalerl_jax.scaling.fit import fit_alone

NOISE = 0.012
REACH = 6.3  # C_mid
ROLLOUTS = (8, 16, 32, 64, 128)


def plateaus(num_curves, table):
    """Print how often A is called identified, without a plateau and with one."""
    count = num_curves // 5
    print(f"### A called identified, {count} curves each, in %\n")
    rows = [("curve", "noise", "40 evaluations", "12 evaluations")]
    curves = {
        f"1 - 0.75 (1 + x / 0.05)^-0.3 to x = {end}": (without_plateau, end)
        for end in (1.0, 6.0)
    }
    curves |= {f"sigmoid to {r} C_mid": (curve_rate, r) for r in (6.3, 3.1, 1.6)}
    for name, (curve, end) in curves.items():
        for noise in (0.006, 0.012, 0.025):
            cells = (_identified(curve, end, n, noise, count) for n in (40, 12))
            rows.append((name, noise, *(f"{100 * cell:.0f}" for cell in cells)))
    table(*rows)


def without_plateau(x):
    """Return a power law of the error, which has no plateau."""
    return 1.0 - 0.75 * (1.0 + x / 0.05) ** -0.3


def _identified(curve, end, points, noise, count):
    """Return the share of curves whose A is called identified."""
    generator, x = np.random.default_rng(3), np.linspace(0.0, end, points + 1)
    calls = []
    for _ in range(count):
        y = np.clip(curve(x) + generator.normal(0, noise, x.size), 0, 1)
        calls.append(scaling.fit(x, y).identified)
    return np.mean(calls)


def noises(num_curves, table):
    """Print the coverage of 90 % intervals and bands under other noise."""
    count = num_curves // 5
    print(f"### Coverage under other noise, {count} curves each, in %\n")
    rows = [("noise", "evaluation at 2x", "curve at 2x", "A", "B")]
    cases = {
        "binomial, 200 completions, R0 = 0.02, x over decades": (_binomial, {}),
        "the same, errors known": (_binomial, {"errors_known": True}),
        "a tenth five times as noisy": (_outliers, {}),
        "the same, `--robust`": (_outliers, {"robust": True}),
        "step 0 five times as noisy": (_noisy_start, {}),
        "AR(1), 0.5, 40 evaluations": (_wandering(40, 0.5), {}),
        "AR(1), 0.5, 20 evaluations": (_wandering(20, 0.5), {}),
        "independent, 40 evaluations": (_wandering(40, 0.0), {}),
    }
    for name, (draw, settings) in cases.items():
        rows.append((name, *_covered(draw, scaling.Settings(**settings), count)))
    table(*rows)


def _covered(draw, settings, count):
    """Return the coverage under one kind of noise."""
    generator, hits = np.random.default_rng(5), np.zeros(4)
    for _ in range(count):
        x, y, errors, truth, seen = draw(generator)
        errors = errors if settings.errors_known else None
        fit = fit_alone(scaling.make_curve(x, y, y_se=errors), settings)
        ends = scaling.Interval(*map(float, fit.prediction_band(2 * REACH)))
        curve = scaling.Interval(*map(float, fit.band(2 * REACH)))
        later = float(curve_rate(2 * REACH, truth))
        hits += [
            _holds(ends, seen),
            _holds(curve, later),
            _holds(fit.interval("A"), truth["asymptote"]),
            _holds(fit.interval("B"), truth["exponent"]),
        ]
    return [f"{100 * hit / count:.1f}" for hit in hits]


def _holds(interval, truth):
    """Return whether an interval contains a value; a missing end is no limit."""
    above = interval.low is None or interval.low <= truth
    return above and (interval.high is None or truth <= interval.high)


def _binomial(generator):
    truth, n = TRUTH | {"initial_reward": 0.02}, 200
    x = np.append(0.0, np.geomspace(0.03, REACH, 30))
    y = generator.binomial(n, curve_rate(x, truth)) / n
    seen = generator.binomial(n, curve_rate(2 * REACH, truth)) / n
    return x, y, np.sqrt(y * (1.0 - y) / n), truth, seen


def _outliers(generator):
    x = np.linspace(0.0, REACH, 41)
    sizes = np.where(generator.random(42) < 0.1, 5 * NOISE, NOISE)
    return _seen(x, generator.normal(0, sizes))


def _noisy_start(generator):
    noise = generator.normal(0, NOISE, 42)
    noise[0] *= 5.0
    return _seen(np.linspace(0.0, REACH, 41), noise)


def _wandering(points, correlation):
    def draw(generator):
        noise = generator.normal(0, NOISE, points + 2)
        for i in range(1, points + 1):  # the later evaluation is far from these
            fresh = np.sqrt(1 - correlation**2) * noise[i]
            noise[i] = correlation * noise[i - 1] + fresh
        return _seen(np.linspace(0.0, REACH, points + 1), noise)

    return draw


def _seen(x, noise):
    """Return evaluations at x [n] and a later one, with noise [n + 1]."""
    y = np.clip(curve_rate(x) + noise[:-1], 0.0, 1.0)
    return x, y, None, TRUTH, float(curve_rate(2 * REACH)) + noise[-1]


def isocompute(num_curves, table):
    """Print how often the n of a budget is the best one that was tested."""
    count = num_curves // 8
    print(f"### IsoCompute, {count} sweeps of {ROLLOUTS} rollouts each, in %\n")
    rows = [("noise", "best n", "standard error", "best n or its neighbour")]
    for noise in (0.004, 0.01):
        generator = np.random.default_rng(1)
        off = np.array([_steps_off(generator, noise) for _ in range(count)])
        right = (off == 0).mean(axis=1)
        error = right.std() / np.sqrt(count)
        cells = (right.mean(), error, (off <= 1).mean())
        rows.append((noise, *(f"{100 * cell:.0f}" for cell in cells)))
    table(*rows)


def _steps_off(generator, noise):
    """Return the steps between the chosen n and the best one, at 12 budgets."""
    start, rise = generator.uniform(0.1, 0.2), generator.uniform(0.03, 0.07)
    exponent = generator.uniform(1.0, 2.0)
    middle = 2e4 * np.exp(generator.uniform(-0.7, 0.7))
    factor, places = generator.uniform(2.0, 5.0), np.arange(len(ROLLOUTS))

    def curves(x):
        middles = middle * factor ** places[:, None]
        return 0.3 + (start + rise * places[:, None]) / (1 + (middles / x) ** exponent)

    x, budgets = np.geomspace(2e3, 2e7, 40), np.geomspace(2e4, 1e7, 12)
    runs = [
        scaling.SweepRun(
            rollouts_per_prompt=n,
            prompts_per_step=32,
            compute=x,
            reward=np.clip(y + generator.normal(0, noise, x.size), 0, 1),
        )
        for n, y in zip(ROLLOUTS, curves(x), strict=True)
    ]
    decided = np.log2(scaling.fit_isocompute(runs).optimal(budgets) / ROLLOUTS[0])
    best = np.argmax(curves(budgets), axis=0)
    return np.abs(np.round(decided) - best)


PARTS = {part.__name__: part for part in (plateaus, noises, isocompute)}
