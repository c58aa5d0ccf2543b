"""Results as text for a terminal.

Nothing is computed here that is not in the result; an unidentified parameter is never
written as a bare number, and x is named in every table.
"""

from collections.abc import Sequence

from scalerl_jax.scaling.bootstrap import Bootstrap
from scalerl_jax.scaling.compare import Comparison
from scalerl_jax.scaling.extrapolate import Extrapolation
from scalerl_jax.scaling.fit import Cutoff
from scalerl_jax.scaling.plan import Estimate, Plan
from scalerl_jax.scaling.ranking import RunRow, RunTable
from scalerl_jax.scaling.records import Interval
from scalerl_jax.scaling.result import Fit, Parameter
from scalerl_jax.scaling.seeds import Pooled


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "".join(
        "  "
        + "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        + "\n"
        for line in lines
    )


def show(interval: Interval | None, form: str = ".4g") -> str:
    """[low, high]; an open side says so."""
    if interval is None:
        return ""
    low = "no limit" if interval.low is None else f"{interval.low:{form}}"
    high = "no limit" if interval.high is None else f"{interval.high:{form}}"
    return f"[{low}, {high}]"


def number(value: float | None, form: str = ".4f") -> str:
    """A number, or a dash for what there is none of."""
    return "-" if value is None else f"{value:{form}}"


def parameter_text(result: Fit, parameter: Parameter, *, short: bool = False) -> str:
    """A parameter with its interval, or why it has none (not so when `short`)."""
    reason = "" if short else f": {result.reason}"
    if not result.climbs and parameter.interval is not None:
        return f"without meaning{reason}"
    form = ".4f" if parameter.unit == "pass rate" else ".4g"
    if parameter.name == "A" and not result.identified:
        return f"not identified{reason}"
    value = f"{parameter.value:{form}}"
    if parameter.interval is None:
        return f"{value} ({parameter.source})"
    value = f"{value} {show(parameter.interval, form)}"
    if parameter.name != "R0" or short:
        return value
    if parameter.source == "measured":
        return f"{value} (step 0: {result.curve.r0:{form}})"
    return f"{value} (free: not measured)"


def fit_text(result: Fit, name: str) -> str:
    """One fit as a short table."""
    curve = result.curve
    left_out = f", {result.num_left_out} left out" if result.num_left_out else ""
    rows = [
        (
            "points",
            f"{result.num_points}{left_out}, {result.x_name} {curve.x[0]:.4g} to "
            f"{result.x_last:.4g}",
        ),
        ("rates", f"{curve.y[0]:.4f} first, {curve.y[-1]:.4f} last"),
        *((p.name, parameter_text(result, p)) for p in result.parameters.values()),
        (
            "R^2",
            f"{result.r_squared:.4f}  (noise {result.sigma:.4f}, residuals correlate "
            f"by {result.autocorrelation:.2f})",
        ),
    ]
    if result.definition.starts_at_r0 and "A" in result.parameters:
        rows.append(("R0 free", _free_text(result)))
    rows.append(("forecast", forecast_text(result)))
    if not result.converged:
        rows.insert(0, ("search", "did not converge: no number below is to be used"))
    width = max(len(name) for name, _ in rows)
    lines = [
        f"{name}: {result.definition.title} of {result.y_name} over {result.x_name}, "
        f"{result.formula}",
        f"  brackets: {100 * result.level:g} % profile intervals; "
        f"protocol: {result.protocol}",
        *(f"  {label:<{width}}  {text}" for label, text in rows),
        *(f"warning: {warning}" for warning in result.warnings),
    ]
    return "\n".join(lines) + "\n"


def _free_text(result: Fit) -> str:
    """What changes when R0 is fitted as well."""
    if result.initial_reward_free:
        return "as above"
    free = result.r0_free
    if free is None:
        return "needs 5 points"
    if not free.climbs:
        return "without meaning: see A"
    return ", ".join(
        f"{p.name} not identified"
        if p.name == "A" and not free.identified
        else f"{p.name} {p.value:.4g} {show(p.interval)}"
        for p in free.parameters.values()
    )


def forecast_text(result: Fit) -> str:
    """How well the first half of the compute foretells the last evaluation."""
    half = result.half_forecast
    if half is None:
        return "none: the first half of the compute has too few points, or falls"
    return (
        f"fitted up to {half.fit_until:.4g}: last point predicted "
        f"{half.predicted:.4f}, measured {half.actual:.4f}, error {half.error:+.4f}"
    )


def sensitivity_rows(result: Fit, rows: Sequence[Cutoff]) -> list[tuple[str, ...]]:
    """One row per cut-off: its points, then every fitted parameter."""
    names = [p.name for p in result.parameters.values() if p.interval is not None]
    return [
        (
            f"{row.fit_from:.4g}",
            str(row.num_points),
            *(_cutoff_cell(row, name) for name in names),
        )
        for row in rows
    ]


def sensitivity_header(result: Fit) -> tuple[str, ...]:
    """Of `sensitivity_rows`."""
    names = [p.name for p in result.parameters.values() if p.interval is not None]
    return (f"fitted from {result.x_name}", "points", *names)


def _cutoff_cell(row: Cutoff, name: str) -> str:
    if name not in row.values:
        return "-"
    if name == "A" and not row.identified:
        return "not identified"
    return f"{row.values[name]:.4g} {show(row.intervals.get(name))}"


def sensitivity_text(result: Fit, rows: Sequence[Cutoff]) -> str:
    """The fit over early cut-offs."""
    return table(sensitivity_header(result), sensitivity_rows(result, rows))


def pooled_text(found: Pooled) -> str:
    """Several seeds of one recipe."""
    header = ("", "mean", "sd over seeds", f"{100 * found.level:g} % interval")
    rows = [
        (
            p.name,
            number(p.mean, ".4g"),
            number(p.standard_deviation, ".4g"),
            p.reason or show(p.interval),
        )
        for p in found.parameters.values()
    ]
    return (
        f"{found.num_seeds} seeds of one recipe, pooled\n"
        + table(header, rows)
        + "".join(f"warning: {warning}\n" for warning in found.warnings)
    )


def estimate_text(estimate: Estimate | None, form: str = ".4g") -> str:
    """A planned quantity; what is not reached says so."""
    if estimate is None:
        return "-"
    value = "never" if estimate.value is None else f"{estimate.value:{form}}"
    return f"{value} {show(estimate.interval, form)}"


def plan_rows(found: Plan) -> list[tuple[str, str]]:
    """Quantity and value, unit included."""
    per = f"per unit of {found.x_name}"
    rows = [
        ("gain of twice the compute", estimate_text(found.doubled, ".4f")),
        (f"gain {per} now", estimate_text(found.marginal_gain)),
    ]
    if found.doubled_cost is not None:
        rows.insert(1, ("cost of that", f"{found.doubled_cost:.4g}"))
    for target in found.targets:
        name = f"{found.x_name} to reach {target.pass_rate:g}"
        rows.append((name, estimate_text(target.compute)))
        rows.append(("  beyond the data", estimate_text(target.further_compute)))
        if target.cost is not None:
            rows.append(("  cost of all", estimate_text(target.cost)))
        rows.append(
            ("  accepted fits that reach it", f"{100 * target.reached_by:.0f} %")
        )
    if found.stop_at is not None:
        rows.append((f"worth having {per}", f"{found.stop_below:.4g}"))
        rows.append((f"stop at {found.x_name}", estimate_text(found.stop_at)))
    rows.append(("advice", found.advice))
    return rows


def plan_text(found: Plan, name: str) -> str:
    """What more compute would bring."""
    rows = plan_rows(found)
    width = max(len(label) for label, _ in rows)
    return (
        f"{name}: plan from {found.y_name} up to {found.x_name} = {found.x_last:.4g}; "
        f"brackets: {100 * found.level:g} %\n"
        + "".join(f"  {label:<{width}}  {value}\n" for label, value in rows)
        + "".join(f"warning: {warning}\n" for warning in found.warnings)
    )


def bootstrap_text(found: Bootstrap) -> str:
    """Intervals from resampling."""
    rows = [
        (name, show(interval, ".4f" if name in ("R0", "A") else ".4g"))
        for name, interval in found.intervals.items()
    ]
    return (
        f"  bootstrap: {found.method}, {found.num_resamples} refits "
        f"({found.num_failed} failed), {100 * found.level:g} %\n"
        + table(("", "interval"), rows)
    )


COMPARE_HEADER = (
    "rank",
    "run",
    "A",
    "A interval",
    "B",
    "C_mid",
    "B at shared A",
    "C_mid at shared A",
)


def compare_rows(runs: RunTable) -> list[tuple[str, ...]]:
    """The rows of many runs under COMPARE_HEADER."""
    return [
        (
            _rank_text(row),
            row.name,
            f"{row.asymptote:.4f}" if row.identified else "not identified",
            show(row.asymptote_interval, ".4f"),
            *(
                number(value if row.fit.climbs else None, ".4g")
                for value in (
                    row.exponent,
                    row.midpoint,
                    row.shared_exponent,
                    row.shared_midpoint,
                )
            ),
        )
        for row in runs.rows
    ]


def _rank_text(row: RunRow) -> str:
    """The rank; "=" where another run has it too."""
    return "-" if row.rank is None else f"{row.rank}{'=' if row.tied else ''}"


def ranking_text(runs: RunTable) -> str:
    """How the runs of a table were ranked."""
    if runs.shared_asymptote is None:
        return "not ranked: A is identified for none"
    return (
        "ranked by A; runs share a rank (=) where the intervals of A overlap, or A is "
        f"within {runs.margin:g}. B at the shared A = {runs.shared_asymptote:.4f} is "
        "of runs whose interval of A overlaps that of the highest"
    )


def runs_text(runs: RunTable) -> str:
    """Many runs, ranked."""
    return (
        f"{runs.y_name} over {runs.x_name}, {ranking_text(runs)}\n"
        + table(COMPARE_HEADER, compare_rows(runs))
        + "".join(f"warning: {warning}\n" for warning in runs.warnings)
    )


def comparison_text(found: Comparison) -> str:
    """Two runs."""
    first, second = found.names
    return (
        f"{first} against {second}\n"
        f"  the paper's rule: {found.rule_winner or 'not decided'}; {found.rule}\n"
        f"  test ({found.test}, {100 * found.level:g} %): "
        f"{found.test_winner or 'not decided'}; {found.verdict}\n"
        + "".join(f"warning: {warning}\n" for warning in found.warnings)
    )


EXTRAPOLATE_HEADER = (
    "law",
    "fitted on",
    "points",
    "mean |error|",
    "mean error",
    "last error",
    "in band",
)


def extrapolation_rows(found: Extrapolation) -> list[tuple[str, ...]]:
    """The rows of the test under EXTRAPOLATE_HEADER."""
    return [
        (
            p.law,
            f"{100 * p.fraction:.0f} %",
            f"{p.num_fitted} + {p.num_held_out}",
            number(p.mean_absolute_error),
            number(p.mean_error, "+.4f"),
            number(p.last_error, "+.4f"),
            "-" if p.share_in_band is None else f"{100 * p.share_in_band:.0f} %",
        )
        for p in found.predictions
    ]


def choice_text(found: Extrapolation) -> str:
    """Which law the held-out error chooses, and on which fractions."""
    if found.best_law is None:
        return "no law is chosen: there is no fraction that all could be fitted to"
    against = "better" if found.beats_last_value else "not better"
    used = "all fractions"
    if len(found.ranked_on) < len(found.fractions):
        shares = ", ".join(f"{100 * share:.0f}" for share in found.ranked_on)
        used = f"{shares} %, to which all laws could be fitted"
    return (
        f"least mean |error| over {used}: {found.best_law} "
        f"({number(found.mean_errors[found.best_law])}), {against} than the last "
        f"value ({number(found.mean_errors['last_value'])})"
    )


def unfitted(found: Extrapolation) -> list[str]:
    """Which laws could not be fitted to which part, and why."""
    laws: dict[str, list[str]] = {}
    for p in found.predictions:
        if p.reason and p.fit is None:
            few = "cannot fix" in p.reason
            points = f"{p.num_fitted} point{'s' if p.num_fitted != 1 else ''}"
            reason = f"{points} are too few" if few else p.reason
            part = f"on {100 * p.fraction:.0f} %: {reason}"
            laws.setdefault(part, []).append(p.law)
    return [f"{', '.join(names)} {reason}" for reason, names in laws.items()]


def extrapolation_text(found: Extrapolation, name: str) -> str:
    """The extrapolation test of one run."""
    return (
        f"{name}: {found.y_name} over {found.x_name}; errors are predicted minus "
        "measured, of points that the fit has not seen\n"
        + table(EXTRAPOLATE_HEADER, extrapolation_rows(found))
        + f"  {choice_text(found)}\n"
        + "".join(f"not fitted: {reason}\n" for reason in unfitted(found))
    )
