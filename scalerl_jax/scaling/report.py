"""The report: one HTML page with every run's figures, tables, warnings and data.

It computes what a reader of a paper would ask for beside the fit itself: the test of
the forecast, other cut-offs, the gain of more compute, and the runs side by side.  The
page is `assets/scaling/report.html`, a template that fetches nothing.
"""

import base64
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl_jax.scaling import text
from scalerl_jax.scaling.compare import compare, compare_many
from scalerl_jax.scaling.fit import sensitivity
from scalerl_jax.scaling.forecasts import extrapolate_curve, plan
from scalerl_jax.scaling.plots import (
    draw_extrapolation,
    draw_fits,
    draw_linearised,
    to_svg,
)
from scalerl_jax.scaling.recipes import group_runs
from scalerl_jax.scaling.records import CurveError
from scalerl_jax.scaling.result import Fit

TEMPLATE = Path(__file__).parents[1] / "assets" / "scaling" / "report.html"
# Runs up to which each gets the extrapolation test with its picture and the table of
# cut-offs: ten more fits each, which for 100 runs would take minutes.
MOST_IN_DETAIL = 12
MOST_TESTED = 6  # runs that the best one is tested against, half a second each
LONGEST_LINE = 40  # letters of a cell; longer ones wrap


def make_report(fits: Mapping[str, Fit], *, title: str) -> str:
    """Return the page, ready to be written to a file.

    Args:
        fits: by the name of the run, all over the same x.
    """
    import jinja2

    in_detail, several = len(fits) <= MOST_IN_DETAIL, len(fits) > 1
    parts = ["Summary", *(["Comparison"] if several else [])]
    parts += [*(fits if in_detail else ["Runs"]), "Method"]
    data = {name: fit.to_record() for name, fit in fits.items()}
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page.filters["base64"] = lambda svg: base64.b64encode(svg).decode()
    page.tests |= {
        "worded": lambda cell: any(map(str.isalpha, cell)),
        "wordy": lambda cell: any(map(str.isalpha, cell)) and len(cell) > LONGEST_LINE,
        "digital": lambda cell: any(map(str.isdigit, cell)),
    }
    drawn = draw_fits(list(fits.values()), list(fits), title=title) if several else None
    return page.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        parts=parts,
        text=text,
        first=next(iter(fits.values())),
        verdicts=[_verdict(name, fit) for name, fit in fits.items()],
        summary=_summary(fits),
        unsure=[name for name, fit in fits.items() if not fit.identified],
        svg=drawn and to_svg(drawn),
        compared=_compared(fits) if several else None,
        most_tested=MOST_TESTED,
        in_detail=in_detail,
        runs=[_run(name, fit, in_detail=in_detail) for name, fit in fits.items()],
        laws={fit.law: fit for fit in fits.values()}.values(),
        data=json.dumps(data, allow_nan=False).replace("</", "<\\/"),
    )


def _verdict(name: str, fit: Fit) -> str:
    """Say what A is, whether the data identify it, and whether more compute pays."""
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
        point = fit.x_last / (100.0 * value)
        price = (
            f": worth it where a point (0.01) of pass rate is worth {point:.4g} "
            f"{fit.x_name} or more"
        )
    return (
        f"{name}: {asymptote}; the next doubling buys {gain} of pass rate for "
        f"{fit.x_last:.4g} {fit.x_name}{price}."
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
                f"{fit.x_last:.4g}",
                f"{fit.curve.y[-1]:.4f}",
                f"{fit.r_squared:.4f}" if fit.climbs else "-",
                text.number(error, "+.4f"),
            )
        )
    return (*header, "foretold from half"), rows


def _compared(fits: Mapping[str, Fit]) -> dict[str, Any] | None:
    """Return the ranked runs, their picture, and the best one against the next."""
    climbing = {name: fit for name, fit in fits.items() if fit.climbs}
    if len(climbing) < 2:
        return None
    runs = compare_many(climbing)
    drawn = None
    if runs.shared_asymptote is not None:
        drawn = draw_linearised(runs, names=list(fits))
    recipes = group_runs(fits)
    order = [n for r in runs.rows for n, group in recipes.items() if r.fit in group]
    best, *others = dict.fromkeys([*order, *recipes])
    rows, warnings = [], dict[str, None]()
    for other in others[:MOST_TESTED]:
        found = compare(
            recipes[best],
            recipes[other],
            names=(best, other),
            num_pairs=math.comb(len(recipes), 2),
        )
        by_a = found.asymptote_difference
        rows.append(
            (
                f"{best} - {other}",
                text.difference_text(by_a) if by_a else "-",
                text.difference_text(found.rate_difference),
                found.winner or found.reason,
                found.paper_rule.winner or "none",
            )
        )
        warnings |= dict.fromkeys(found.warnings)
    header = ("difference", "A", "pass rate", "verdict", "the paper's rule")
    return {
        "ranked": runs,
        "svg": drawn and to_svg(drawn),
        "tests": (header, rows),
        "left": len(others) > MOST_TESTED,
        "warnings": warnings,
    }


def _run(name: str, fit: Fit, *, in_detail: bool) -> dict[str, Any]:
    """Return one run: picture, parameters, plan, data, and in detail its tests."""
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
            (f"{x:.6g}", f"{y:.4f}", f"{y - r:.4f}", f"{r:+.4f}")
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
