"""The report: one HTML page with every run's figures, tables, warnings and data.

It computes what a reader of a paper would ask for beside the fit itself: the test of
the forecast, other cut-offs, the gain of more compute, and the runs side by side.  The
page is `assets/scaling/report.html`, a template that fetches nothing.
"""

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl_jax.process.printing import shown
from scalerl_jax.scaling import text
from scalerl_jax.scaling.compare import Comparison
from scalerl_jax.scaling.fit import sensitivity
from scalerl_jax.scaling.forecasts import extrapolate_curve, plan
from scalerl_jax.scaling.plots import (
    draw_extrapolation,
    draw_fits,
    draw_linearised,
    to_svg,
)
from scalerl_jax.scaling.plots_of_training import draw_training
from scalerl_jax.scaling.recipes import Compared, compare_recipes, group_runs, rank
from scalerl_jax.scaling.records import CurveError, amount
from scalerl_jax.scaling.result import Fit
from scalerl_jax.scaling.run_details import (
    RunDetails,
    origins_sheet,
    read_details,
    settings_sheet,
)
from scalerl_jax.scaling.tables import EVALS_NAME

TEMPLATE = Path(__file__).parents[1] / "assets" / "scaling" / "report.html"
# Runs up to which each gets the extrapolation test with its picture and the table of
# cut-offs: ten more fits each, which for 100 runs would take minutes.
MOST_IN_DETAIL = 12
MOST_PAIRS = 6  # pairs of recipes that are compared, half a second each
LONGEST_LINE = 40  # letters of a cell; longer ones wrap


def make_report(
    fits: Mapping[str, Fit],
    *,
    title: str,
    paths: Mapping[str, Path] | None = None,
    pairs: Sequence[Comparison] | None = None,
    left_out: Sequence[str] = (),
) -> str:
    """Return the page, ready to be written to a file.

    Args:
        fits: by the name of the run, all over the same x.
        paths: what each run was read from; a run's directory also gives its settings,
            training curves and some rollouts.
        pairs: comparisons of recipes chosen in advance; by default a few recipes are
            compared pairwise, and many with the recipe of the best run.
        left_out: sentences on runs that are not among the fits, or not whole.
    """
    import jinja2

    first = next(iter(fits.values()))
    details = _read_runs(paths or {}, first.x_name)
    trained = _draw_training(fits, details)
    told = any(each.rollouts for each in details.values())
    in_detail, several = len(fits) <= MOST_IN_DETAIL, len(fits) > 1
    parts = ["Summary", *(["Comparison"] if several else [])]
    parts += [*(["Settings"] if details else []), *(["Training"] if trained else [])]
    parts += [*(["Rollouts"] if told else []), *(fits if in_detail else ["Runs"])]
    data = {name: fit.to_record() for name, fit in fits.items()}
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page.filters["base64"] = lambda svg: base64.b64encode(svg).decode()
    page.filters["cut"] = text.cut
    page.tests |= {
        "worded": lambda cell: any(map(str.isalpha, cell)),
        "wordy": lambda cell: any(map(str.isalpha, cell)) and len(cell) > LONGEST_LINE,
        "digital": lambda cell: any(map(str.isdigit, cell)),
    }
    drawn = draw_fits(list(fits.values()), list(fits), title=title) if several else None
    made = page.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        parts=[*parts, "Method"],
        text=text,
        first=first,
        verdicts=[_verdict(name, fit) for name, fit in fits.items()],
        summary=_summary(fits),
        left_out=left_out,
        unsure=[name for name, fit in fits.items() if not fit.identified],
        svg=drawn and to_svg(drawn),
        compared=_compared(fits, pairs) if several else None,
        in_detail=in_detail,
        details=details,
        origins=origins_sheet(details),
        settings=settings_sheet(details),
        training=trained,
        runs=[_run(name, fit, in_detail=in_detail) for name, fit in fits.items()],
        laws={fit.law: fit for fit in fits.values()}.values(),
        # Without "<" no text can end the element or begin a comment in it.
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    )
    return shown(made)  # no letter of a name reverses the text after it


def _read_runs(paths: Mapping[str, Path], x_name: str) -> dict[str, RunDetails]:
    """Read the details of runs from their directories, by name.

    A directory with one curve has the name of that curve; one with several has its
    path.  Files other than evals.jsonl have no details.
    """
    curves: dict[Path, list[str]] = {}
    for name, path in paths.items():
        folder = path.parent if path.name == EVALS_NAME else path
        if folder.is_dir():
            curves.setdefault(folder, []).append(name)
    found = {
        names[0] if len(names) == 1 else str(folder): read_details(
            folder, x_name=x_name
        )
        for folder, names in curves.items()
    }
    return {name: each for name, each in found.items() if each.says_anything}


def _draw_training(
    fits: Mapping[str, Fit], details: Mapping[str, RunDetails]
) -> bytes | None:
    """Return the picture of the training curves; None: nothing was logged."""
    drawn = draw_training(
        {name: each.training for name, each in details.items()},
        names=list(dict.fromkeys([*fits, *details])),
        x_name=next(iter(fits.values())).x_name,
        first=min(float(fit.whole_curve.x[0]) for fit in fits.values()),
    )
    return drawn and to_svg(drawn)


def _verdict(name: str, fit: Fit) -> str:
    """Return a sentence on A, its identification, and the worth of more compute."""
    if not fit.climbs:
        return f"{name}: the curve does not climb, so it has no asymptote."
    asymptote = "its law has no asymptote"
    if "A" in fit.parameters:
        value = text.parameter_text(fit, fit.parameters["A"], short=True)
        asymptote = "A is not identified"
        if fit.identified:
            asymptote = f"A is identified, {value}"
    planned = plan(fit)
    gain = text.estimate_text(planned.doubled, ".4f")
    value = planned.doubled.value
    price = ""
    if value is not None and value > 0:
        point = text.in_words(fit.x_last / (100.0 * value), fit.x_name)
        price = f": worth it where a point (0.01) of pass rate is worth {point} or more"
    return (
        f"{name}: {asymptote}; the next doubling buys {gain} of pass rate for "
        f"{text.in_words(fit.x_last, fit.x_name)}{price}."
    )


def _summary(fits: Mapping[str, Fit]) -> text.Sheet:
    """Return a row for each run."""
    x_name = next(iter(fits.values())).x_name
    shown = ("A", "R0", "B", "C_mid")
    header = ("run", *shown, "points", f"last {x_name}", "last rate", "R²")
    rows: list[text.Cells] = []
    for name, fit in fits.items():
        parameters = [
            text.parameter_text(fit, fit.parameters[key], short=True)
            if key in fit.parameters
            else "-"
            for key in shown
        ]
        error = None if fit.half_forecast is None else fit.half_forecast.error
        rows.append(
            (
                name,
                *parameters,
                str(fit.num_points),
                amount(fit.x_last),
                f"{fit.curve.y[-1]:.4f}",
                f"{fit.r_squared:.4f}" if fit.climbs else "-",
                text.number(error, "+.4f"),
            )
        )
    return (*header, "foretold from half"), rows


def _compared(
    fits: Mapping[str, Fit], pairs: Sequence[Comparison] | None
) -> dict[str, Any]:
    """Return the ranked runs, their picture, and recipes two by two."""
    if pairs is None:
        found = compare_recipes(fits, group_runs(fits), most_pairs=MOST_PAIRS)
    else:
        runs = rank(fits, group_runs(fits))
        found = Compared(runs=runs, pairs=tuple(pairs), num_left_out=0)
    drawn = None
    if found.runs.shared_asymptote is not None:
        drawn = draw_linearised(found.runs, names=list(fits))
    rows: list[text.Cells] = []
    for pair in found.pairs:
        by_a = pair.asymptote_difference
        rows.append(
            (
                " - ".join(pair.names),
                text.difference_text(by_a) if by_a else "-",
                text.difference_text(pair.rate_difference),
                pair.winner or pair.reason,
                pair.paper_rule.winner or "none",
            )
        )
    header = ("difference", "A", "pass rate", "verdict", "the paper's rule")
    return {
        "ranked": found.runs,
        "svg": drawn and to_svg(drawn),
        "verdicts": [text.verdict_text(pair) for pair in found.pairs],
        "tests": (header, rows),
        "left_out": found.num_left_out,
        "warnings": dict.fromkeys(w for pair in found.pairs for w in pair.warnings),
    }


def _run(name: str, fit: Fit, *, in_detail: bool) -> dict[str, Any]:
    """Return one run: picture, parameters, plan, data; `in_detail`, its tests too."""
    curve = fit.whole_curve
    residuals = fit.residuals(curve.x, curve.y)
    run: dict[str, Any] = {
        "name": name,
        "fit": fit,
        "svg": to_svg(draw_fits([fit], [name], title=name)),
        "parameters": [
            (p.name, text.parameter_text(fit, p, short=True), p.unit, p.meaning)
            for p in fit.parameters.values()
        ],
        "plan": plan(fit) if fit.climbs else None,
        "points": [
            (amount(x, digits=6), f"{y:.4f}", f"{y - r:.4f}", f"{r:+.4f}")
            for x, y, r in zip(curve.x, curve.y, residuals, strict=True)
        ],
    }
    if not in_detail:
        return run
    run |= {"cutoffs": sensitivity(fit), "test": None, "untested": None}
    settings = dataclasses.replace(fit.settings, protocol="default")
    try:
        run["test"] = extrapolate_curve(curve, settings=settings)
        run["test_svg"] = to_svg(draw_extrapolation(run["test"], title=name))
    except CurveError as failure:
        run["untested"] = str(failure)
    return run
