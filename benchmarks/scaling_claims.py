"""Claims of the fitter, tested on simulated curves: parts of `scaling.py`.

R0 is observed at step 0 with the noise of every other evaluation, as in a real run.
The fitter does not get the truth, only what a run directory has.
"""

import functools
from unittest import mock

import numpy as np

from scalerl_jax import scaling
from scalerl_jax.scaling import obstacles
from scalerl_jax.scaling.fit import fit_alone

TRUTH = {"initial_reward": 0.25, "asymptote": 0.61, "exponent": 1.92, "midpoint": 1.0}
NOISES = (0.006, 0.012, 0.025, 0.05)
# Evaluations after step 0, and how many C_mid they reach.
DESIGNS = ((40, 6.3), (40, 3.1), (40, 1.6), (12, 6.3), (12, 3.1))
COMPLETIONS = 16
# Shares of A - R0 that are reached at x, by the name of the curve.
CLIMBS = {
    "sigmoid": lambda x: x**1.92 / (1.0 + x**1.92),
    "exponential": lambda x: -np.expm1(-x),
    "two phases": lambda x: 0.6 * -np.expm1(-2.1 * x) + 0.4 / (1.0 + (3.6 / x) ** 3),
}
REACHES = (1.0, 1.02, 1.05, 1.1, 1.25, 2.0)  # the second recipe's, in the first's


def curve_rate(x, truth=TRUTH):
    """Return pass rates of the law at x."""
    return scaling.sigmoid(x, **truth)


def selection(num_curves, table):
    """Print coverage of intervals of identified A, and of prediction bands."""
    count = 4 * num_curves
    print(f"### Claims, R0 observed with the same noise, {count} curves each, in %\n")
    rows = [
        (
            "evaluations, reach",
            "noise",
            "A identified",
            "then in its interval",
            "identified and wrong",
            "evaluation at 2x in its band",
            "curve at 2x in its band",
        )
    ]
    for points, reach in DESIGNS:
        for noise in NOISES:
            rows.append(_selection_row(points, reach, noise, count))
    table(*rows)


def _selection_row(points, reach, noise, count):
    """Return the row of one design and noise."""
    generator = np.random.default_rng([points, round(10 * reach), round(1e4 * noise)])
    x, hits = np.linspace(0.0, reach, points + 1), np.zeros(4)
    later = float(curve_rate(2.0 * reach))
    for _ in range(count):
        y = np.clip(curve_rate(x) + generator.normal(0, noise, x.size), 0, 1)
        seen = np.clip(later + generator.normal(0, noise), 0, 1)
        fit = fit_alone(scaling.make_curve(x, y), scaling.Settings())
        low, high = fit.prediction_band(2.0 * reach)
        curve_low, curve_high = fit.band(2.0 * reach)
        interval = fit.asymptote_interval
        right = fit.identified and interval.low <= TRUTH["asymptote"] <= interval.high
        hits += [
            fit.identified,
            right,
            low <= seen <= high,
            curve_low <= later <= curve_high,
        ]
    identified, right, seen, held = hits
    return (
        f"{points}, {reach} C_mid",
        noise,
        f"{100 * identified / count:.1f}",
        f"{100 * right / identified:.1f}" if identified else "-",
        f"{100 * (identified - right) / count:.2f}",
        f"{100 * seen / count:.1f}",
        f"{100 * held / count:.1f}",
    )


def short(num_curves, table):
    """Print forecasts of short noisy curves against plain baselines."""
    sets = num_curves
    print(f"### Mean |error| of the later half, {sets} sets of four seeds\n")
    print(f"{COMPLETIONS} completions an evaluation, recipes drawn at random.\n")
    rows = [("evaluations", "of", "sigmoid", "its best curve", "power law", "last 3")]
    for points in (8, 12, 24):
        errors = {"each seed": [], "mean of the seeds": []}
        generator = np.random.default_rng(points)
        for _ in range(sets):
            x, y = four_seeds(generator, points)
            errors["each seed"] += [_errors(x, seed) for seed in y]
            errors["mean of the seeds"].append(_errors(x, y.mean(axis=0)))
        for name, found in errors.items():
            known = [each for each in found if each is not None]
            means = (f"{mean:.3f}" for mean in np.mean(known, axis=0))
            rows.append((points, name, *means))
    table(*rows)


def four_seeds(generator, points):
    """Return compute [n] from 0 on, and pass rates [4, n] of one recipe's seeds."""
    x = np.arange(points + 1.0)
    start = generator.uniform(0.05, 0.4)
    truth = {
        "initial_reward": start,
        "asymptote": min(start + generator.uniform(0.15, 0.55), 0.97),
        "exponent": generator.uniform(0.8, 2.5),
        "midpoint": points * np.exp(generator.uniform(-3.0, 0.5)),
    }
    drawn = generator.binomial(COMPLETIONS, curve_rate(x, truth), (4, x.size))
    return x, drawn / COMPLETIONS


def _errors(x, y):
    """Return errors of the forecast, best curve, SciPy's power law and last three."""
    from scipy.optimize import least_squares

    seen = x <= 0.5 * x[-1]
    try:
        fit = scaling.fit(x[seen], y[seen])
    except scaling.CurveError:
        return None
    early = seen & (x > 0)
    power = least_squares(
        lambda p: p[0] - p[1] * x[early] ** -p[2] - y[early],
        [0.6, 0.3, 0.5],
        bounds=([0.0, 0.0, 0.01], [1.0, 1.0, 8.0]),
    ).x
    later = x[~seen]
    guesses = (
        fit.forecast(later),
        fit.predict(later),
        power[0] - power[1] * later ** -power[2],
        np.full(later.size, y[seen][-3:].mean()),
    )
    return [float(np.abs(guess - y[~seen]).mean()) for guess in guesses]


def wandering(num_curves, table):
    """Print forecasts where noise wanders, and where no sigmoid is the truth."""
    count = max(num_curves // 20, 1)
    print(f"### Mean |error| of the later half, {count} curves a row\n")
    rows = [("curve", "evaluations", "error", "in the fit's own band, %")]
    designs = [
        (f"AR(1), {phi}, {noise}", points, functools.partial(_wanders, phi, noise))
        for points in (24, 48)
        for phi, noise in ((0.0, 0.02), (0.5, 0.02), (0.9, 0.02), (0.9, 0.005))
    ]
    for name, points, draw in [*designs, ("two phases, 0.003", 60, _two_phases)]:
        generator, errors, held = np.random.default_rng(points), [], []
        for _ in range(count):
            x, y = draw(generator, points)
            seen = x <= 0.5 * x[-1]
            fit = scaling.fit(x[seen], y[seen])
            found, (low, high) = fit.forecast(x[~seen]), fit.band(x[~seen])
            errors.append(np.abs(found - y[~seen]).mean())
            held.append(((low <= found) & (found <= high)).mean())
        error, share = f"{np.mean(errors):.4f}", f"{100 * np.mean(held):.0f}"
        rows.append((name, points, error, share))
    table(*rows)


def _wanders(phi, noise, generator, points):
    """Return a sigmoid at x [n] with noise that is correlated by phi."""
    x, drawn = np.linspace(0.2, 6.0, points), generator.normal(0, noise, points)
    for i in range(1, points):
        drawn[i] = phi * drawn[i - 1] + np.sqrt(1.0 - phi**2) * drawn[i]
    truth = {
        "initial_reward": 0.2,
        "asymptote": generator.uniform(0.5, 0.9),
        "exponent": generator.uniform(1.0, 2.5),
        "midpoint": generator.uniform(0.5, 3.0),
    }
    return x, np.clip(curve_rate(x, truth) + drawn, 0, 1)


def _two_phases(generator, points):
    """Return a climb to 0.45 and a later one to 0.65, at x [n]."""
    x = np.linspace(0.1, 12.0, points)
    first = {"initial_reward": 0.2, "asymptote": 0.45, "exponent": 2, "midpoint": 0.3}
    second = {
        "initial_reward": 0.0,
        "asymptote": 0.2,
        "exponent": generator.uniform(2.0, 4.0),
        "midpoint": generator.uniform(2.0, 5.0),
    }
    drawn = generator.normal(0, 0.003, points)
    return x, curve_rate(x, first) + curve_rate(x, second) + drawn


def phases(num_curves, table):
    """Print how often a climb in two phases fools the sigmoid, and warnings of it."""
    count = num_curves // 2
    print(f"### A climb in two phases, to 0.45 and then to 0.65, {count} each, in %\n")
    rows = [
        (
            "evaluations, noise",
            "data end",
            "A identified",
            "and its interval without 0.65",
            "warned",
            "warned on one phase",
        )
    ]
    for points, noise in ((40, 0.006), (40, 0.025), (16, 0.006), (16, 0.025)):
        for end, name in ((0.45, "before the second phase"), (1.0, "in it")):
            rows.append(_phases_row(points, noise, end, name, count))
    table(*rows)


def _phases_row(points, noise, end, name, count):
    """Return the row of one end of the data."""
    generator = np.random.default_rng([points, round(1e4 * noise), round(100 * end)])
    x, hits = np.linspace(0.0, end, points + 1), np.zeros(4)
    first = TRUTH | {"asymptote": 0.45, "exponent": 2.5, "midpoint": 0.1}
    second = {"initial_reward": 0.0, "asymptote": 0.2, "exponent": 6.0, "midpoint": 0.7}
    one = TRUTH | {"asymptote": 0.65, "exponent": 2.0, "midpoint": 0.25 * end}
    for _ in range(count):
        drawn = generator.normal(0, noise, x.size)
        fit = scaling.fit(x, curve_rate(x, first) + curve_rate(x, second) + drawn)
        usual = scaling.fit(x, curve_rate(x, one) + drawn)
        interval = fit.asymptote_interval
        hits += [
            fit.identified,
            fit.identified and not interval.low <= 0.65 <= interval.high,
            fit.residual_p_value < 0.05,
            usual.residual_p_value < 0.05,
        ]
    shares = (f"{100 * hit / count:.0f}" for hit in hits)
    return (f"{points}, {noise}", name, *shares)


def flats(num_curves, table):
    """Print how often curves are called flat, and pairs of equal runs decided."""
    count = num_curves
    print(f"### Called flat, {count} curves each, in %\n")
    rows = [("gain over its noise", *(f"{n} evaluations" for n in (6, 12, 24)))]
    for gain in (0.0, 0.5, 1.0, 2.0, 4.0):
        cells = []
        for points in (6, 12, 24):
            generator, x = np.random.default_rng(points), np.arange(points + 1.0)
            climb = 0.025 * gain * x / (x + points / 4.0)
            called = [
                scaling.fit(x, 0.3 + climb + generator.normal(0, 0.025, x.size)).flat
                for _ in range(count // 4)
            ]
            cells.append(f"{100 * np.mean(called):.0f}")
        rows.append((gain, *cells))
    table(*rows)


def ends(num_curves, table):
    """Print winners of equal recipes of which one reaches further than the other."""
    count = 2 * num_curves // 5
    print(f"### Equal recipes that end elsewhere, {count} pairs a cell, in %\n")
    rows = [("curve", "spread", "compared", *REACHES)]
    for name, spread in (
        *((name, 0.003) for name in CLIMBS),
        ("exponential", 0.01),
        ("two phases", 0.01),
    ):
        generator = np.random.default_rng(round(1000 * spread))
        won = np.zeros((2, len(REACHES)), int)
        for at, reach in enumerate(REACHES):
            for _ in range(count):
                pair = [_recipe(generator, name, spread, end) for end in (1.0, reach)]
                won[0, at] += scaling.compare(*pair).winner is not None
                with mock.patch.object(obstacles, "COMMON_END", np.inf):
                    won[1, at] += scaling.compare(*pair).winner is not None
        for found, what in zip(won, ("up to the first end", "whole"), strict=True):
            shares = (f"{100 * each / count:.0f}" for each in found)
            rows.append((name, spread, what, *shares))
    table(*rows)


def _recipe(generator, name, spread, reach):
    """Return fits of three runs with 20 evaluations up to 3.2 times `reach`."""
    x = reach * np.linspace(0.16, 3.2, 20)
    gains = 0.36 + spread * generator.normal(size=(3, 1))
    y = 0.25 + gains * CLIMBS[name](x) + generator.normal(0, 0.005, (3, 20))
    return [scaling.fit(x, each, initial_reward=0.25) for each in y]


PARTS = {
    part.__name__: part for part in (selection, short, wandering, phases, flats, ends)
}
