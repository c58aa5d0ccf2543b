"""Forecasts of measured curves by several fitters: a part of `scaling.py`.

The curves are those of `studies/`, which `scalerl study export` writes: fitted up to a
share of the compute, judged on the later evaluations and on the last one.  `band` is
the share of later evaluations inside the 90 % band of the package's sigmoid.  Forecasts
from half of the compute are drawn in `studies/forecasts.png`.
"""

import warnings
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import OptimizeWarning, curve_fit

from scalerl_jax.scaling import Settings, extrapolate_curve, load_curves
from scalerl_jax.scaling.plots import COLOURS
from scalerl_jax.scaling.records import CurveError

STUDIES = Path(__file__).resolve().parent.parent / "studies"
FRACTIONS = (0.25, 0.5)
DRAWN_FROM = 0.5
PICTURE = "forecasts.png"
OURS = "this package, sigmoid"
LAWS = {
    OURS: "sigmoid",
    "this package, power law": "power",
    "this package, logistic": "logistic",
    "last three": "last_value",
}
SCIPY = "SciPy's curve_fit, sigmoid"


def fitters(_, table, folder=STUDIES):
    """Print errors of forecasts of each study's curves, by fitter."""
    found = sorted(each.parent for each in folder.glob("*/curves.*"))
    print("### Forecasts of measured curves, |error| in the mean\n")
    if not found:
        print(f"There is no exported study in {folder}.\n")
    drawn = {}  # mean errors of the last evaluation by fitter, by study
    for study in dict.fromkeys(found):
        curves = load_curves(study)
        print(f"`studies/{study.name}`, {len(curves)} runs\n")
        rows = [("fitter", "from", "curves", "later evaluations", "the last", "band")]
        for share in FRACTIONS:
            errors = {}
            for curve in curves:
                for name, each in forecasts(curve, share).items():
                    errors.setdefault(name, []).append(each)
            if not errors:
                rows.append(("too few evaluations", f"{100 * share:.0f} %", 0, *"---"))
            for name, each in errors.items():
                later, last, band = np.transpose(each)
                inside = f"{100 * band.mean():.0f} %" if name == OURS else "-"
                cells = f"{later.mean():.4f}", f"{last.mean():.4f}", inside
                rows.append((name, f"{100 * share:.0f} %", len(each), *cells))
                if share == DRAWN_FROM:
                    label = f"{study.name} ({len(each)} of {len(curves)})"
                    drawn.setdefault(label, {})[name] = last.mean()
        table(*rows)
    if drawn:
        draw(drawn, folder / PICTURE)


def draw(errors, file):
    """Draw the mean error of each fitter, a row of points per study."""
    figure = Figure(figsize=(7.0, 1.2 + 0.3 * len(errors)), layout="constrained")
    axes = figure.subplots()
    rows = range(len(errors))
    for place, name in enumerate((*LAWS, SCIPY)):
        values = [by[name] for by in errors.values()]
        size = 60 if name == OURS else 30
        colour = COLOURS[place % len(COLOURS)]
        axes.scatter(values, rows, s=size, color=colour, label=name, zorder=2)
    axes.set_yticks(rows, list(errors))
    axes.invert_yaxis()
    axes.set(xlabel="mean error of the last evaluation", xlim=(0.0, None))
    axes.set_title("forecasts from half of the compute (curves of a study)", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=90)


def forecasts(curve, share):
    """Return mean |error| of later evaluations, |error| of the last, share in the band.

    By fitter; empty if a law has too few points, so that all have the same curves.
    """
    try:
        tried = extrapolate_curve(
            curve,
            fractions=(share,),
            laws=[law for law in LAWS.values() if law != "last_value"],
            settings=Settings(),
        )
    except CurveError:
        return {}
    found = {name: tried.get(law, share) for name, law in LAWS.items()}
    if any(each.mean_absolute_error is None for each in found.values()):
        return {}
    judged = {
        name: (
            each.mean_absolute_error,
            abs(each.last_error),
            each.share_in_band or 0.0,
        )
        for name, each in found.items()
    }
    seen = curve.x <= share * curve.x[-1]
    foretold = plain_fit(curve.x[seen], curve.y[seen])(curve.x[~seen])
    error = np.abs(foretold - curve.y[~seen])
    return judged | {SCIPY: (error.mean(), error[-1], 0.0)}


def plain_fit(x, y):
    """Return the plain fit of the sigmoid: from a usual start, within limits.

    If the search fails, it is constant at the last value.
    """

    def rate(x, r0, a, b, c):
        return r0 + (a - r0) / (1.0 + (c / x) ** b)

    start = (y[0], min(y.max() + 0.05, 1.0), 1.0, float(np.median(x)))
    limits = ([0.0, 0.0, 0.05, 1e-3 * x[0]], [1.0, 1.0, 10.0, 1e3 * x[-1]])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimizeWarning)  # of the covariance
            best, _ = curve_fit(rate, x, y, start, bounds=limits)
    except RuntimeError:
        return lambda later: np.full(later.shape, y[-1])
    return lambda later: rate(later, *best)


PARTS = {"fitters": fitters}
