"""Results as text for a terminal, and as tables that the report shows too.

This module computes nothing that is not in the result; it never writes an unidentified
parameter as a bare number, and names x in every table.

One file above 400 lines: it has the text of every kind of result.
"""

from collections.abc import Sequence
from typing import Any

from scalerl_jax.scaling.bins import widest_bin
from scalerl_jax.scaling.bootstrap import Bootstrap
from scalerl_jax.scaling.compare import Comparison, Pooled, RunTable
from scalerl_jax.scaling.differences import Difference
from scalerl_jax.scaling.fit import Cutoff
from scalerl_jax.scaling.forecasts import (
    Estimate,
    Extrapolation,
    Plan,
    PooledExtrapolation,
)
from scalerl_jax.scaling.isocompute import Allocation, IsoCompute
from scalerl_jax.scaling.laws_over_sizes import SurfaceFit, TanExtrapolation
from scalerl_jax.scaling.power import PowerPlan
from scalerl_jax.scaling.records import Interval, Parameter, amount
from scalerl_jax.scaling.result import Fit

Cells = Sequence[str]
Sheet = tuple[Cells, list[Cells]]  # header and rows
PAPER_RULE = (
    "the paper's rule, which ignores noise and names a winner of equal recipes too"
)
# Compute in sentences, by the column that counts it.
UNITS = {
    "compute_chip_hours": "chip-hours",
    "train_flops": "training FLOPs",
    "train_tokens": "trained tokens",
    "generated_tokens": "generated tokens",
    "policy_version": "optimizer steps",
    "step": "optimizer steps",
}
LARGE = {"million": 1e6, "billion": 1e9, "trillion": 1e12}
AMOUNT = ""  # the form of numbers of any size: `amount`
PLAIN = {"pass rate": ".4f"}  # by unit; all others are amounts


def table(header: Cells, rows: Sequence[Cells], *, words: bool = False) -> str:
    """Return aligned columns: the first to the left, the others to the right.

    With `words` all are to the left.  An empty header is left out.
    """
    lines = [header, *rows] if header else list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = ["<", *["<" if words else ">"] * (len(widths) - 1)]
    shapes = list(zip(sides, widths, strict=True))
    return "".join(
        "  "
        + "  ".join(
            f"{c:{s}{w}}" for c, (s, w) in zip(line, shapes, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )


def warned(warnings: Sequence[str]) -> str:
    """Return a line for each warning."""
    return "".join(f"warning: {warning}\n" for warning in warnings)


def _block(
    said: str, header: Cells, rows: Sequence[Cells], warnings: Sequence[str] = ()
) -> str:
    """Return a line, a table and warnings."""
    return f"{said}\n{table(header, rows)}{warned(warnings)}"


def cut(text: str, most: int) -> str:
    """Return a text, with a note in place of its middle if it is longer than `most`."""
    if len(text) <= most:
        return text
    left_out = f" [... {len(text) - most:,} more letters ...] "
    return text[: most - most // 2] + left_out + text[len(text) - most // 2 :]


def percent(level: float) -> str:
    """Return a share as 90 %."""
    return f"{100 * level:g} %"


def number(value: float | None, form: str = ".4f") -> str:
    """Return a number as text, or a dash for None."""
    return "-" if value is None else _written(value, form)


def _written(value: float, form: str) -> str:
    return amount(value) if form == AMOUNT else f"{value:{form}}"


def show(interval: Interval | None, form: str = AMOUNT) -> str:
    """Return [low, high]; an open side says so."""
    if interval is None:
        return ""
    low = "no limit" if interval.low is None else _written(interval.low, form)
    high = "no limit" if interval.high is None else _written(interval.high, form)
    return f"[{low}, {high}]"


def parameter_text(result: Fit, parameter: Parameter, *, short: bool = False) -> str:
    """Return a parameter with its interval, or why it has none (not if `short`)."""
    reason = "" if short else f": {result.reason}"
    if not result.climbs and parameter.interval is not None:
        where = "" if short else ": see A"
        return f"without meaning{reason if parameter.name == 'A' else where}"
    form = PLAIN.get(parameter.unit, AMOUNT)
    if parameter.name == "A" and not result.identified:
        return f"not identified{reason}"
    value = _written(parameter.value, form)
    if parameter.interval is None:
        return f"{value} ({parameter.source})"
    value = f"{value} {show(parameter.interval, form)}"
    if parameter.name != "R0" or short:
        return value
    if parameter.source == "measured":
        return f"{value} (step 0: {result.curve.r0:{form}})"
    return f"{value} (free: not measured)"


def fit_text(result: Fit, name: str) -> str:
    """Return one fit as a short table."""
    curve = result.curve
    left_out = f", {result.num_left_out} left out" if result.num_left_out else ""
    rows = [
        (
            "points",
            f"{result.num_points}{left_out}, {result.x_name} {amount(curve.x[0])} to "
            f"{amount(result.x_last)}{means_text(result)}",
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
    return (
        f"{name}: {result.definition.title} of {result.y_name} over {result.x_name}, "
        f"{result.formula}\n  brackets: {percent(result.level)} profile intervals; "
        f"protocol: {result.protocol}\n"
        + table((), rows, words=True)
        + warned(result.warnings)
    )


def means_text(result: Fit) -> str:
    """Describe the bins whose means a very long curve is fitted by; "": it has none."""
    if result.problem.whole is None:
        return ""
    return (
        f"; fitted as the means of {result.num_means} bins of neighbours, whose x "
        f"differ by {percent(round(100 * widest_bin(result.problem), 2) / 100)} at most"
    )


def _free_text(result: Fit) -> str:
    """Describe the fit in which R0 is free as well."""
    if result.initial_reward_source == "free":
        return "as above"
    free = result.r0_free
    if free is None:
        return "needs 5 points"
    if not free.climbs:
        return "without meaning: see A"
    return ", ".join(
        f"{p.name} not identified"
        if p.name == "A" and not free.identified
        else f"{p.name} {amount(p.value)} {show(p.interval)}"
        for p in free.parameters.values()
    )


def forecast_text(result: Fit) -> str:
    """Describe how well the first half of the compute predicts the last evaluation."""
    half = result.half_forecast
    if half is None:
        return "none: the first half of the compute has too few points, or falls"
    return (
        f"fitted up to {amount(half.fit_until)}: last point predicted "
        f"{half.predicted:.4f}, measured {half.actual:.4f}, error {half.error:+.4f}"
    )


def sensitivity_sheet(result: Fit, cutoffs: Sequence[Cutoff]) -> Sheet:
    """Return a row per cut-off: its points, then every fitted parameter."""
    names = [p.name for p in result.parameters.values() if p.interval is not None]

    def cell(row: Cutoff, name: str) -> str:
        if name not in row.values:
            return "-"
        if name == "A" and not row.identified:
            return "not identified"
        return f"{amount(row.values[name])} {show(row.intervals.get(name))}"

    return (f"fitted from {result.x_name}", "points", *names), [
        (amount(row.fit_from), str(row.num_points), *(cell(row, n) for n in names))
        for row in cutoffs
    ]


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def pooled_text(found: Pooled, recipe: str = "") -> str:
    """Return several seeds of one recipe."""
    header = ("", "mean", "sd over seeds", f"{percent(found.level)} interval")
    rows = [
        (
            p.name,
            number(p.mean, AMOUNT),
            number(p.standard_deviation, AMOUNT),
            p.reason or show(p.interval),
        )
        for p in found.parameters.values()
    ]
    return _block(
        f"{recipe and f'{recipe}: '}{_seeds(found.num_seeds)} of one recipe, pooled",
        header,
        rows,
        found.warnings,
    )


def bootstrap_text(found: Bootstrap) -> str:
    """Return intervals from resampling."""
    rows = [
        (name, show(interval, ".4f" if name in ("R0", "A") else AMOUNT))
        for name, interval in found.intervals.items()
    ]
    refits = f"{found.num_resamples} refits ({found.num_failed} failed)"
    said = f"  bootstrap: {found.method}, {refits}, {percent(found.level)}"
    return _block(said, ("", "interval"), rows)


def estimate_text(estimate: Estimate | None, form: str = AMOUNT) -> str:
    """Return a planned quantity with its interval; "never" if it is not reached."""
    if estimate is None:
        return "-"
    value = "never" if estimate.value is None else _written(estimate.value, form)
    return f"{value} {show(estimate.interval, form)}"


def plan_rows(found: Plan) -> list[Cells]:
    """Return quantity and value, unit included."""
    per = f"per unit of {found.x_name}"
    rows: list[Cells] = [
        ("gain of twice the compute", estimate_text(found.doubled, ".4f"))
    ]
    if found.doubled_cost is not None:
        rows.append(("cost of that", amount(found.doubled_cost)))
    rows.append((f"gain {per} now", estimate_text(found.marginal_gain)))
    for target in found.targets:
        name = f"{found.x_name} to reach {target.pass_rate:g}"
        rows.append((name, estimate_text(target.compute)))
        rows.append(("  beyond the data", estimate_text(target.further_compute)))
        if target.cost is not None:
            rows.append(("  cost of all", estimate_text(target.cost)))
        share = f"{100 * target.reached_by:.0f} %"
        rows.append(("  accepted fits that reach it", share))
    if found.stop_at is not None:
        rows.append((f"worth having {per}", number(found.stop_below, AMOUNT)))
        rows.append((f"stop at {found.x_name}", estimate_text(found.stop_at)))
    return [*rows, ("advice", found.advice)]


def plan_text(found: Plan, name: str) -> str:
    """Describe the gain and the cost of more compute, in a table."""
    return (
        f"{name}: plan from {found.y_name} up to {found.x_name} = "
        f"{amount(found.x_last)}; brackets: {percent(found.level)}\n"
        + table((), plan_rows(found), words=True)
        + warned(found.warnings)
    )


def runs_sheet(runs: RunTable) -> Sheet:
    """Return the runs by rank; "=" marks a rank that several runs share."""
    header = "rank,run,A,A interval,B,C_mid,B at shared A,C_mid at shared A".split(",")
    rows: list[Cells] = []
    for row in runs.rows:
        shapes = row.exponent, row.midpoint, row.shared_exponent, row.shared_midpoint
        rows.append(
            (
                "-" if row.rank is None else f"{row.rank}{'=' if row.tied else ''}",
                row.name,
                f"{row.asymptote:.4f}" if row.identified else "not identified",
                show(row.asymptote_interval, ".4f"),
                *(number(v if row.fit.climbs else None, AMOUNT) for v in shapes),
            )
        )
    return header, rows


def ranking_text(runs: RunTable) -> str:
    """Describe how the runs of a table were ranked."""
    if runs.shared_asymptote is None:
        return "not ranked: A is identified for none"
    if any(row.fit.curve.is_wall_time for row in runs.rows):
        return "not ranked: chip-hours of a CPU are wall time"
    return (
        "ranked by A; runs share a rank (=) where A differs by no more than their "
        f"noise and a spread of {runs.run_sd:.2g} between runs of one recipe allow, or "
        f"by {runs.margin:g} at most. B at the shared A = "
        f"{runs.shared_asymptote:.4f} is of runs whose interval of A overlaps that of "
        "the highest"
    )


def runs_text(runs: RunTable) -> str:
    """Return many runs, ranked."""
    said = f"{runs.y_name} over {runs.x_name}, {ranking_text(runs)}"
    return _block(said, *runs_sheet(runs), runs.warnings)


def comparison_text(found: Comparison) -> str:
    """Return the verdict on two recipes, what it rests on, and the paper's rule."""
    first, second = found.names
    rows = [
        (what, f"{difference_text(difference)}, {percent(difference.level)}")
        for what, difference in differences_of(found)
    ]
    runs = " and ".join(map(str, found.num_runs))
    pairing = f", paired by {found.paired_by}" if found.paired else ""
    rule = found.paper_rule
    of = "A" if found.asymptote_difference else "the pass rate"
    return (
        f"{first} against {second}: {_verdict(found)}\n"
        + table((), [(f"{first} - {second}", ""), *rows], words=True)
        + f"  {runs} runs{pairing}; spread of {of} between runs of one recipe "
        f"{found.run_sd:.4f} ({found.run_sd_source}); at most "
        f"{percent(1.0 - found.level)} of equal recipes get a winner if all spread "
        "alike\n"
        f"  {PAPER_RULE}: {rule.winner or 'none'}; {rule.says}\n"
        + warned(found.warnings)
    )


def verdict_text(found: Comparison) -> str:
    """Return the verdict on two recipes, and the paper's rule, as two sentences."""
    first, second = found.names
    deciding = differences_of(found)
    if found.winner is not None:  # show only the difference that decided
        deciding = [each for each in deciding if each[1].sign][:1]
    shown = "; ".join(f"{what} {difference_text(each)}" for what, each in deciding)
    return (
        f"{first} against {second}: {_verdict(found)} ({first} - {second}: {shown}). "
        f"{PAPER_RULE[0].upper()}{PAPER_RULE[1:]}: {found.paper_rule.winner or 'none'}."
    )


def _verdict(found: Comparison) -> str:
    return f"{found.winner} is better: {found.reason}" if found.winner else found.reason


def differences_of(found: Comparison) -> list[tuple[str, Difference]]:
    """Return the differences that a verdict rests on, by the name of their quantity."""
    named = {
        "A": found.asymptote_difference,
        "log B at the shared A": found.log_exponent_difference,
    }
    if found.asymptote_difference is None:
        named[f"pass rate at {amount(found.compared_at)}"] = found.rate_difference
    return [(name, each) for name, each in named.items() if each is not None]


def difference_text(found: Difference) -> str:
    """Return a difference with its interval."""
    return f"{found.value:+.4f} {show(found.interval, '+.4f')}"


def power_text(found: PowerPlan) -> str:
    """Return the runs and the compute that would decide a difference."""
    spread = f"{found.run_sd:.4f}"
    if found.run_sd_interval.high is not None:
        spread += f" {show(found.run_sd_interval, '.4f')}"
    pairing = f"paired by {found.paired_by}" if found.paired else "not paired"
    runs = "more than a thousand" if found.runs is None else f"{found.runs:,}"
    low, high = ("no limit" if n is None else f"{n:,}" for n in found.runs_interval)
    if found.run_sd_interval.high is not None:
        runs += f" [{low}, {high}]"
    noise = "no limit" if found.noise is None else f"{found.noise:.4f}"
    rows = [
        ("spread between runs of one recipe", f"{spread} ({found.run_sd_source})"),
        ("noise of the evaluations alone, of one run each", f"+- {noise}"),
        (f"runs of each, for {percent(found.power)} of studies", runs),
        ("of one run", f"{amount(found.compute_of_a_run)} {found.x_name}"),
        ("of all of them", f"{number(found.compute, AMOUNT)} {found.x_name}"),
    ]
    powers = [(str(n), f"{100 * p:.0f} %") for n, p in found.found_by.items()]
    return (
        f"a difference of {found.true_difference:g} in {found.quantity}; "
        f"{found.num_recipes} recipes, the others against the first; "
        f"{percent(found.level)}; {pairing}\n"
        + table((), rows, words=True)
        + table(("runs of each", "found in"), powers)
        + warned(found.warnings)
    )


def extrapolation_sheet(found: Extrapolation) -> Sheet:
    """Return the extrapolation test, a row per law and fraction."""
    header = "law,fitted on,points,mean |error|,mean error,last error,in band".split(
        ","
    )
    return header, [
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
    """Name the law that the held-out error chooses, and the fractions used."""
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
    """List the laws that could not be fitted to a part, with the reasons."""
    laws: dict[str, list[str]] = {}
    for p in found.predictions:
        if p.reason and p.fit is None:
            points = "1 point is" if p.num_fitted == 1 else f"{p.num_fitted} points are"
            few = "cannot fix" in p.reason
            reason = f"{points} too few" if few else p.reason
            laws.setdefault(f"on {100 * p.fraction:.0f} %: {reason}", []).append(p.law)
    return [f"{', '.join(names)} {reason}" for reason, names in laws.items()]


def extrapolation_text(found: Extrapolation, name: str) -> str:
    """Return the extrapolation test of one run."""
    said = (
        f"{name}: {found.y_name} over {found.x_name}; errors are predicted minus "
        "measured, of points that the fit has not seen"
    )
    said = _block(said, *extrapolation_sheet(found)) + f"  {choice_text(found)}\n"
    return said + "".join(f"not fitted: {reason}\n" for reason in unfitted(found))


def pooled_extrapolation_text(found: PooledExtrapolation, recipe: str = "") -> str:
    """Return the extrapolation tests of several seeds of a recipe."""
    header = (
        *("law", "fitted on", "seeds", "mean |error|", "mean error"),
        *("last error", "in band"),
    )
    rows = [
        (
            p.law,
            f"{100 * p.fraction:.0f} %",
            str(p.num_seeds),
            number(p.mean_absolute_error),
            _signed(p.mean_error, p.mean_error_interval),
            _signed(p.last_error, p.last_error_interval),
            "-" if p.share_in_band is None else f"{100 * p.share_in_band:.0f} %",
        )
        for p in found.predictions
    ]
    said = (
        f"{recipe and f'{recipe}: '}{_seeds(found.num_seeds)} of one recipe, pooled; "
        f"{percent(found.level)} intervals of the mean errors over the seeds"
    )
    return _block(said, header, rows, found.warnings)


def _signed(value: float | None, interval: Interval | None) -> str:
    """Return a difference with its interval, if it has one."""
    return f"{number(value, '+.4f')} {show(interval, '+.4f')}".rstrip()


def surface_text(found: SurfaceFit, what: str) -> str:
    """Return the parameters of a law over several inputs."""
    rows = [
        (p.name, amount(p.value), show(p.interval), p.unit, p.meaning)
        for p in found.parameters.values()
    ]
    verdict = "" if found.identified else "not identified: see the warnings\n"
    if not found.converged:
        verdict = "the search did not converge: no number here is to be used\n"
    return (
        f"{found.formula}\n{what}, {found.num_points} points; "
        f"R^2 {found.r_squared:.4f}\n"
        + table(("", "value", percent(found.level), "unit", "meaning"), rows)
        + verdict
        + warned(found.warnings)
    )


def size_tests_text(tests: Sequence[TanExtrapolation], x_name: str) -> str:
    """Return Tan et al.'s two protocols; the second one needs three model sizes."""
    notes = [
        "intra-model: every size fitted on its first points, the rest predicted",
        "inter-model: all sizes but the largest fitted; its slope is predicted, its E "
        "is taken from its own first points ('E from'; the paper: from all)"
        if len(tests) > 1
        else "inter-model: needs three model sizes",
    ]
    header = ("protocol", "fitted", "predicted", "E from", "mean |error|", "R^2")
    rows = [
        (
            test.protocol,
            str(test.num_fitted),
            str(test.num_held_out),
            str(test.intercept_from or "-"),
            number(test.mean_absolute_error),
            number(test.r_squared),
        )
        for test in tests
    ]
    said = f"Tan et al.'s law over {x_name}; errors of 1 - pass rate"
    return _block(said, header, rows) + "".join(f"  {note}\n" for note in notes)


def compute_optimal_text(allocations: Sequence[dict[str, Any]]) -> str:
    """Return model size, tokens and loss of each budget of FLOPs."""
    return "".join(
        f"{a['flops']:g} FLOPs: N = {amount(a['model_size'])} parameters, "
        f"D = {amount(a['tokens'])} tokens, loss {a['loss']:.4f}"
        + (", beyond the models that were fitted\n" if a["beyond_data"] else "\n")
        for a in allocations
    )


def isocompute_text(found: IsoCompute, allocations: Sequence[Allocation]) -> str:
    """Return n*(C), and how to spend each budget of rollouts."""
    rows = [(name, amount(value)) for name, value in found.parameters.items()]
    said = (
        f"IsoCompute: log2 n*(C) = low + (high - low) / (1 + (C0 / C)^k), C in "
        f"rollouts; n tested: {', '.join(map(str, found.tested))}\n"
        + table(("", "value"), rows)
    )
    for plan in allocations:
        beyond = ", where not every n has a run" if plan.beyond_data else ""
        said += (
            f"{plan.budget:g} rollouts{beyond}: n = {plan.rollouts_per_prompt} "
            f"(n* {amount(plan.optimal)}), "
            f"B_p = {plan.prompts_per_step}, M = {plan.steps} steps, reward "
            f"{plan.reward:.4f}\n"
        )
    return said + found.decision + "\n" + warned(found.warnings)


def in_words(value: float, x_name: str) -> str:
    """Return compute in a sentence: 1.35 million generated tokens, 0.02 chip-hours."""
    unit = UNITS.get(x_name.removeprefix("eval/"), x_name)
    for name, size in LARGE.items():
        if size <= abs(value) < 1000.0 * size:
            return f"{value / size:.3g} {name} {unit}"
    return f"{amount(value)} {unit}"
