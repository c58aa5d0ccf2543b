"""The report: one HTML page with every run's figures, tables, warnings and data.

It computes what a reader of a paper would ask for beside the fit itself: the test of
the forecast, other cut-offs, the gain of more compute, and the runs side by side.
"""

import dataclasses
from collections.abc import Mapping

from scalerl_jax.scaling import text
from scalerl_jax.scaling.axes import to_svg
from scalerl_jax.scaling.compare import compare
from scalerl_jax.scaling.curves import CurveError
from scalerl_jax.scaling.extrapolate import extrapolate_curve
from scalerl_jax.scaling.figure import draw_fits, draw_linearised
from scalerl_jax.scaling.fit import sensitivity
from scalerl_jax.scaling.forecast_figure import draw_extrapolation
from scalerl_jax.scaling.page import Page
from scalerl_jax.scaling.plan import plan
from scalerl_jax.scaling.ranking import compare_many
from scalerl_jax.scaling.result import Fit

# Runs up to which each gets the extrapolation test with its picture and the table of
# cut-offs: ten more fits each, which for 100 runs would take minutes.
MOST_IN_DETAIL = 12
MOST_TESTED = 6  # runs that the best one is tested against, half a second each
METHOD = (
    "Each curve is fitted by least squares: the law is linear in R0 and A once its "
    "shape is known, so a grid over the shapes with the levels solved exactly finds "
    "the basin of the global minimum, and a damped Gauss-Newton descent its floor. "
    "Evaluations count alike unless the report was asked for weights.",
    "Intervals are profile likelihoods: a parameter is held, all others are fitted "
    "again, and the interval ends where the misfit has grown by more than noise "
    "explains. The noise is the scatter of one run's own evaluations: a second seed, "
    "or other prompts, would move the curve by more (ScaleRL: A by up to 0.015 "
    "between seeds).",
    "The asymptote A is called identified when the data bound it from above and have "
    "passed the midpoint C_mid with certainty; more than 2.4 times C_mid is usually "
    "needed. Otherwise no number is given for it.",
    "Forecasts are tested on the run's own past: fitted to the first part of the "
    "compute, compared with the rest. Laws are chosen by that error, never by R^2. "
    "The paper has shown forecasts over 2 to 2.8 times the fitted compute.",
    "Recipes are compared by the paper's rule: the higher A wins; within 0.02 of each "
    "other, both are fitted again with the mean A, and the higher B wins. Beside it "
    "stands a test by resampling the residuals.",
)


def make_report(
    fits: Mapping[str, Fit], *, title: str, most_in_detail: int = MOST_IN_DETAIL
) -> str:
    """The page, ready to be written to a file.

    Args:
        fits: by the name of the run, all over the same x.
        title: of the page.
        most_in_detail: runs up to which each gets every test.
    """
    page = Page(title)
    first = next(iter(fits.values()))
    page.text(
        f"{len(fits)} run{'s' if len(fits) > 1 else ''}: {first.y_name} over "
        f"{first.x_name}. Brackets hold {100 * first.level:g} % intervals.",
        kind="note",
    )
    page.heading("Summary")
    rows = [_summary_row(name, fit) for name, fit in fits.items()]
    header = [name.format(x=first.x_name) for name in SUMMARY_HEADER]
    page.table(header, rows, stacked=True)
    unsure = [name for name, fit in fits.items() if not fit.identified]
    if unsure:
        page.text(
            f"No asymptote is identified for: {', '.join(unsure)}", kind="warning"
        )
    if len(fits) > 1:
        page.picture(
            to_svg(draw_fits(list(fits.values()), list(fits), title=title)),
            says="pass rate over compute of all runs with their fits",
        )
        _add_comparison(page, fits)
    in_detail = len(fits) <= most_in_detail
    if not in_detail:
        page.heading("Runs")
    for name, fit in fits.items():
        _add_run(page, name, fit, in_detail=in_detail)
    _add_method(page, fits, in_detail=in_detail)
    page.data("fits", {name: fit.to_record() for name, fit in fits.items()})
    return page.render()


SUMMARY_HEADER = (
    "run",
    "points",
    "last {x}",
    "last rate",
    "R0",
    "A",
    "B",
    "C_mid",
    "R²",
    "foretold from half",
)


def _summary_row(name: str, fit: Fit) -> tuple[str, ...]:
    parameters = [
        text.parameter_text(fit, fit.parameters[key], short=True)
        if key in fit.parameters
        else "-"
        for key in ("R0", "A", "B", "C_mid")
    ]
    error = None if fit.half_forecast is None else fit.half_forecast.error
    return (
        name,
        str(fit.num_points),
        f"{fit.x_last:.4g}",
        f"{fit.curve.y[-1]:.4f}",
        *parameters,
        f"{fit.r_squared:.4f}" if fit.climbs else "-",
        text.number(error, "+.4f"),
    )


def _add_comparison(page: Page, fits: Mapping[str, Fit]) -> None:
    """The ranked table, the linearised picture, and the best run against each other."""
    page.heading("Comparison")
    climbing = {name: fit for name, fit in fits.items() if fit.climbs}
    if len(climbing) < 2:
        page.text("Fewer than two runs climb: there is nothing to compare.")
        return
    runs = compare_many(climbing)
    page.text(f"The runs are {text.ranking_text(runs)}.")
    page.table(text.COMPARE_HEADER, text.compare_rows(runs))
    for warning in runs.warnings:
        page.text(warning, kind="warning")
    if runs.shared_asymptote is not None:
        page.picture(
            to_svg(draw_linearised(runs, names=list(fits))),
            says="linearised pass rate over compute; the slope is B",
        )
    best = runs.rows[0].name
    rows, warnings = [], dict[str, None]()
    for row in runs.rows[1 : MOST_TESTED + 1]:
        found = compare(climbing[best], climbing[row.name], names=(best, row.name))
        rows.append(
            (
                f"{best} - {row.name}",
                text.show(found.asymptote_difference, "+.4f")
                if all(found.identified)
                else "-",
                text.show(found.exponent_difference, "+.3f") or "-",
                text.show(found.rate_difference, "+.4f"),
                found.rule_winner or "not decided",
                found.test_winner or "not decided",
            )
        )
        warnings |= dict.fromkeys(found.warnings)
    header = ("difference", "A", "B at shared A", "pass rate", "rule", "test")
    page.table(header, rows)
    if len(runs.rows) > MOST_TESTED + 1:
        page.text(f"Tested: the {MOST_TESTED} runs ranked next.", kind="note")
    for warning in warnings:
        page.text(warning, kind="warning")


def _add_run(page: Page, name: str, fit: Fit, *, in_detail: bool) -> None:
    """One run: picture, parameters, warnings, plan, tests and data."""
    if in_detail:
        page.heading(name)
    else:
        page.fold(name)
    page.picture(
        to_svg(draw_fits([fit], [name], title=name)),
        says=f"pass rate over compute of {name} with its fit",
    )
    if fit.reason is not None:
        page.text(f"A is not identified: {fit.reason}", kind="warning")
    for warning in fit.warnings:
        page.text(warning, kind="warning")
    page.table(
        ("parameter", "value", "unit", "meaning"),
        [
            (p.name, text.parameter_text(fit, p, short=True), p.unit, p.meaning)
            for p in fit.parameters.values()
        ],
    )
    page.text(f"Forecast from the first half: {text.forecast_text(fit)}.")
    if fit.climbs:
        page.heading("Plan", level=3)
        page.table(("quantity", "value"), text.plan_rows(plan(fit)))
    if in_detail:
        _add_tests(page, name, fit)
    page.fold("data")
    curve = fit.whole_curve
    page.table(
        (fit.x_name, fit.y_name, "fitted", "residual"),
        [
            (f"{x:.6g}", f"{y:.4f}", f"{y - r:.4f}", f"{r:+.4f}")
            for x, y, r in zip(
                curve.x, curve.y, fit.residuals(curve.x, curve.y), strict=True
            )
        ],
    )
    page.unfold()
    if not in_detail:
        page.unfold()


def _add_tests(page: Page, name: str, fit: Fit) -> None:
    """The extrapolation test and the table of cut-offs."""
    page.heading("Extrapolation test", level=3)
    settings = dataclasses.replace(fit.settings, protocol="default")
    try:
        found = extrapolate_curve(fit.whole_curve, settings=settings)
    except CurveError as failure:
        page.text(str(failure), kind="warning")
    else:
        page.picture(
            to_svg(draw_extrapolation(found, title=name)),
            says=f"curves fitted to the first parts of {name}, over what came",
            wide=True,
        )
        page.table(text.EXTRAPOLATE_HEADER, text.extrapolation_rows(found))
        page.text(text.choice_text(found))
        for reason in text.unfitted(found):
            page.text(f"Not fitted: {reason}", kind="note")
    page.heading("Other cut-offs", level=3)
    rows = sensitivity(fit)
    page.table(text.sensitivity_header(fit), text.sensitivity_rows(fit, rows))


def _add_method(page: Page, fits: Mapping[str, Fit], *, in_detail: bool) -> None:
    """How the numbers came about."""
    page.heading("Method")
    for fit in {fit.law: fit for fit in fits.values()}.values():
        page.formula(fit.formula)
        page.text(
            f"{fit.definition.title}, {fit.definition.source}; x is {fit.x_name}, R is "
            f"{fit.y_name}. Protocol: {fit.protocol}."
        )
    for paragraph in METHOD:
        page.text(paragraph)
    if not in_detail:
        page.text(
            "With so many runs the extrapolation test and other cut-offs are left out; "
            "`extrapolate` and `fit --sensitivity` show them."
        )
