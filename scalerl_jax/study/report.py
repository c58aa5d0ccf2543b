"""The report of a study: tables as CSV, pictures as PNG, and one page of HTML.

The tests are those of `scaling.compare`: runs of one seed are paired, all pairs of the
study share the error, and the spread between runs is estimated from all arms.
"""

import contextlib
import csv
import dataclasses
import functools
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl_jax.run.writing import replace_file
from scalerl_jax.scaling import text
from scalerl_jax.scaling.compare import FEWEST_RECIPES, Comparison, Recipe, compare
from scalerl_jax.scaling.fit import fit_curve
from scalerl_jax.scaling.forecasts import (
    LAST_VALUE,
    Extrapolation,
    extrapolate_curve,
)
from scalerl_jax.scaling.plots import draw_fits, draw_linearised, to_png
from scalerl_jax.scaling.power import runs_to_decide
from scalerl_jax.scaling.pruning import ReplayedStudy, replay
from scalerl_jax.scaling.recipes import group_runs, rank
from scalerl_jax.scaling.records import CurveError, Interval
from scalerl_jax.scaling.report import make_report
from scalerl_jax.scaling.result import Fit
from scalerl_jax.study.design import Planned, Study, interleaved
from scalerl_jax.study.runs import EVALS_FILE, look, read_curve

Row = dict[str, Any]
_LINES_FILE = "linearised.png"  # if an A is identified
_FORESEEN_FROM = (0.25, 0.5)  # of the compute, to forecast the last evaluation from


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """Results of a study's runs so far."""

    fits: Mapping[Planned, Fit]
    pairs: tuple[Comparison, ...]
    left_out: Mapping[str, str]  # why a run has no fit, by its name

    @functools.cached_property
    def pruned(self) -> ReplayedStudy | None:
        """The effect of --prune on this study; None unless every run is complete."""
        if self.left_out:
            return None
        return replay(
            [(run.arm, run.seed, fit.whole_curve) for run, fit in self.fits.items()]
        )

    @functools.cached_property
    def forecasts(self) -> Mapping[Planned, Extrapolation]:
        """Forecasts of the runs from their first parts, where these allow a fit."""
        found = {}
        for run, fit in self.fits.items():
            with contextlib.suppress(CurveError):
                found[run] = extrapolate_curve(
                    fit.whole_curve,
                    fractions=_FORESEEN_FROM,
                    laws=(fit.law,),
                    settings=fit.settings,
                )
        return found

    @property
    def notes(self) -> list[str]:
        """The reader's notes on all runs: rows left out, and why."""
        found = (w for fit in self.fits.values() for w in fit.whole_curve.warnings)
        return list(dict.fromkeys(found))

    def of_arm(self, arm: str) -> list[tuple[int, Fit]]:
        """Return the fits of an arm, by seed."""
        return [(run.seed, fit) for run, fit in self.fits.items() if run.arm == arm]


def find(study: Study, root: Path) -> Findings:
    """Fit every run that has a curve, and compare the arms.

    Raises:
        ValueError: no run has a curve yet.
    """
    fits: dict[Planned, Fit] = {}
    left_out: dict[str, str] = {}
    for planned in interleaved(study):
        state = look(study, root, planned)
        if not (state.folder / EVALS_FILE).exists():
            left_out[planned.name] = state.failure or "not begun"
            continue
        curve = read_curve(study, state.folder)
        try:
            if isinstance(curve, CurveError):
                raise curve
            curve = dataclasses.replace(
                curve,
                name=planned.name,
                recipe=planned.arm,
                seed=str(planned.seed),
            )
            fits[planned] = fit_curve(curve)
        except CurveError as error:
            left_out[planned.name] = str(error)
            continue
        if not state.finished:
            why = f"; it cannot reach {state.behind}" if state.behind else ""
            why += f"; it failed: {state.failure}" if state.failure else ""
            done = f"step {state.step} of {study.steps}{why}"
            left_out[planned.name] = f"fitted as far as it is: {done}"
    if not fits:
        raise ValueError(
            f"{root}: no run has enough evaluations for a fit yet: "
            f"{next(iter(left_out.values()))}; scalerl study run resumes them"
        )
    return Findings(fits=fits, pairs=_compared(study, fits), left_out=left_out)


def _compared(study: Study, fits: Mapping[Planned, Fit]) -> tuple[Comparison, ...]:
    """Compare the pairs of arms that have runs, by the seeds that both have."""
    found = []
    arms: dict[str, dict[int, Fit]] = {arm: {} for arm in study.arms}
    for run, fit in fits.items():
        arms[run.arm][run.seed] = fit
    recipes = {arm: Recipe(tuple(of.values())) for arm, of in arms.items() if of}
    for names in study.compared:
        both = [s for s in study.seeds if all(s in arms[arm] for arm in names)]
        if not both:
            continue
        paired = len(both) > 1
        a, b = (recipes[arm].fits if paired else arms[arm][both[0]] for arm in names)
        found.append(
            compare(
                a,
                b,
                names=names,
                paired=paired,
                num_pairs=len(study.compared),
                others=[of for arm, of in recipes.items() if arm not in names],
            )
        )
    return tuple(found)


# ---- tables


def curves_table(study: Study, findings: Findings) -> list[Row]:
    """Return every evaluation of every run."""
    rows = []
    for run, fit in findings.fits.items():
        curve = fit.whole_curve
        start = [] if curve.r0 is None else [(0.0, curve.r0, curve.r0_se)]
        errors = curve.y_se if curve.y_se is not None else [None] * len(curve.x)
        points = [*start, *zip(curve.x, curve.y, errors, strict=True)]
        rows += [
            {
                "arm": run.arm,
                "seed": run.seed,
                study.axis: float(x),
                "pass_rate": float(y),
                "pass_rate_se": None if se is None else float(se),
            }
            for x, y, se in points
        ]
    return rows


def runs_table(findings: Findings) -> list[Row]:
    """Return A, B and C_mid of every run, with intervals, and its forecasts."""
    return [
        {
            "arm": run.arm,
            "seed": run.seed,
            **_parameters(fit),
            **_foreseen(findings.forecasts.get(run), fit.law),
        }
        for run, fit in findings.fits.items()
    ]


def _parameters(fit: Fit) -> Row:
    row: Row = {"r0": fit.curve.r0, "r_squared": fit.r_squared}
    row["identified"] = fit.identified
    for name in ("A", "B", "C_mid"):
        found = fit.parameters.get(name)
        row[name] = found and found.value
        row |= _ends(name, found and found.interval)
    row["last"] = float(fit.whole_curve.y[-1])
    return row


def _ends(name: str, interval: Interval | None) -> Row:
    low, high = (interval.low, interval.high) if interval else (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def _foreseen(tried: Extrapolation | None, law: str) -> Row:
    """Return the last evaluation as forecast from the first parts of the compute."""
    row: Row = {}
    for share in _FORESEEN_FROM:
        found, name = tried and tried.get(law, share), f"foretold_from_{share:g}"
        row[name] = found and found.last_predicted
        row[f"{name}_error"] = found and found.last_error
        row[f"{name}_in_band"] = found and found.share_in_band
    return row


def forecasts_table(findings: Findings) -> list[Row]:
    """Return how good the forecasts of all runs are, beside their last value's."""
    rows: list[Row] = []
    for share in _FORESEEN_FROM:
        pairs = [
            (tried.get(findings.fits[run].law, share), tried.get(LAST_VALUE, share))
            for run, tried in findings.forecasts.items()
        ]
        pairs = [both for both in pairs if all(e.last_error is not None for e in both)]
        row: Row = {"from": share, "runs": len(pairs), "of": len(findings.fits)}
        for at, name in enumerate(("fit", LAST_VALUE)):
            errors = [abs(both[at].last_error or 0.0) for both in pairs]
            row[f"{name}_error"] = statistics.fmean(errors) if errors else None
        bands = [fit.share_in_band for fit, _ in pairs if fit.share_in_band is not None]
        row["in_band"] = statistics.fmean(bands) if bands else None
        rows.append(row)
    return rows


def forecast_lines(findings: Findings) -> list[str]:
    """Return text on the forecasts, for the shares from which there are some."""
    level = 100 * next(iter(findings.fits.values())).settings.level
    return [
        f"forecasts of the last evaluation from {100 * row['from']:.0f} % of the "
        f"compute, {row['runs']} of {row['of']} runs: mean error "
        f"{row['fit_error']:.3f}, of the last value {row['last_value_error']:.3f}"
        + (
            f"; {100 * row['in_band']:.0f} % of later evaluations are in the "
            f"{level:.0f} % band"
            if row["in_band"] is not None
            else ""
        )
        for row in forecasts_table(findings)
        if row["runs"]
    ]


def differences_table(findings: Findings) -> list[Row]:
    """Return each pair of arms: differences, intervals, verdict, seeds to decide it."""
    rows: list[Row] = []
    for pair in findings.pairs:
        row: Row = {"a": pair.names[0], "b": pair.names[1], "runs": pair.num_runs[0]}
        row |= {"winner": pair.winner, "reason": pair.reason, "level": pair.level}
        for name, found in (
            ("A", pair.asymptote_difference),
            ("log_B_at_shared_A", pair.log_exponent_difference),
            ("pass_rate", pair.rate_difference),
        ):
            row[name] = found and found.value
            row |= _ends(name, found and found.interval)
        row["B_at_shared_A_a"], row["B_at_shared_A_b"] = pair.exponents_at_shared or (
            None,
            None,
        )
        row["shared_A"] = pair.shared_asymptote
        row["compared_at"] = pair.compared_at
        row["paper_rule"] = pair.paper_rule.winner
        row["seeds_to_decide"] = None if pair.winner else seeds_to_decide(pair)
        rows.append(row)
    return rows


def seeds_to_decide(pair: Comparison) -> int | None:
    """Return the seeds per arm that decide a pair by A (or the rate) with power 0.8.

    The measured difference, spread and noise of evaluations are taken as the true ones.
    None: a thousand seeds would not decide it, or no seeds, as the arms cannot be
    compared or the noise has no limit.
    """
    found = pair.asymptote_difference or pair.rate_difference
    if not pair.comparable or found.noise is None:
        return None
    return runs_to_decide(
        found.value,
        found.run_sd,
        level=found.level,
        recipes=max(found.num_recipes, FEWEST_RECIPES),
        paired=pair.paired,
        noise=found.noise,
    )


def to_csv(rows: Sequence[Row]) -> bytes:
    """Return a table as CSV, with a header; None is an empty cell."""
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


# ---- files


def write_report(
    study: Study, findings: Findings, root: Path, out: Path, *, title: str
) -> list[Path]:
    """Write the tables, the pictures and the page into `out`; return their paths."""
    fits = {run.name: fit for run, fit in findings.fits.items()}
    out.mkdir(parents=True, exist_ok=True)
    files = {
        "curves.csv": to_csv(curves_table(study, findings)),
        "runs.csv": to_csv(runs_table(findings)),
        "differences.csv": to_csv(differences_table(findings)),
        "forecasts.csv": to_csv(forecasts_table(findings)),
        "curves.png": to_png(draw_fits(list(fits.values()), list(fits), title=title)),
        "report.html": make_report(
            fits,
            title=title,
            paths={run.name: root / run.name for run in findings.fits},
            pairs=findings.pairs,
            left_out=said_of_left_out(study, findings),
        ).encode(),
    }
    runs = rank(fits, group_runs(fits)) if len(fits) > 1 else None
    if runs and runs.shared_asymptote is not None:
        files[_LINES_FILE] = to_png(draw_linearised(runs, names=list(fits)))
    else:
        (out / _LINES_FILE).unlink(missing_ok=True)  # of an earlier report
    for name, data in files.items():
        replace_file(out / name, data)
    return [out / name for name in files]


def describe(study: Study, findings: Findings) -> str:
    """Return the verdicts of a study and its table of runs, as text."""
    lines = [f"over {study.axis}"]
    rows = [_arm_row(arm, findings.of_arm(arm)) for arm in study.arms]
    lines += [text.table(("arm", "runs", "A", "B", "C_mid", "last"), rows)]
    for pair in findings.pairs:
        lines.append(text.verdict_text(pair).rstrip())
        if not pair.winner and (count := seeds_to_decide(pair)):
            lines.append(
                f"  if the true difference is the measured one, {count} seeds of each "
                f"would decide it in 4 of 5 studies"
            )
        lines += [f"  warning: {warning}" for warning in pair.warnings]
    lines += said_of_left_out(study, findings)
    lines += forecast_lines(findings)
    lines += pruned_lines(findings.pruned)
    return "\n".join(lines) + "\n"


def said_of_left_out(study: Study, findings: Findings) -> list[str]:
    """Return sentences on runs without a fit or an end, and on pairs without both."""
    compared = {tuple(pair.names) for pair in findings.pairs}
    return [f"{name}: {why}" for name, why in findings.left_out.items()] + [
        f"{a} against {b}: not compared: no seed has a run of both"
        for a, b in study.compared
        if (a, b) not in compared
    ]


def pruned_lines(found: ReplayedStudy | None) -> list[str]:
    """Return text on what --prune would have saved, and its wrong decisions."""
    if found is None:
        return []
    wrong = [f"{each.arm}/seed{each.seed}" for each in found.stopped if each.wrong]
    named = f": {', '.join(wrong)}" if wrong else ""
    return [
        f"--prune would have stopped {len(found.stopped)} of {found.num_runs} runs and "
        f"saved {100 * found.saved:.0f} % of the compute; {len(wrong)} of those ended "
        f"no lower than the run that they could not reach{named}"
    ]


def _arm_row(arm: str, runs: Iterable[tuple[int, Fit]]) -> tuple[str, ...]:
    """Return the means over the seeds of an arm; of A, B, C_mid if all identify A."""
    fits = [fit for _, fit in runs]
    if not fits:
        return (arm, "0", "-", "-", "-", "-")
    last = f"{statistics.fmean(fit.whole_curve.y[-1] for fit in fits):.3f}"
    if unsure := sum(not fit.identified for fit in fits):
        ceiling = f"not identified by {unsure}"
        return (arm, str(len(fits)), ceiling, "-", "-", last)
    means = [
        format(statistics.fmean(fit.value(name) for fit in fits), form)
        for name, form in (("A", ".3f"), ("B", ".2f"), ("C_mid", ",.4g"))
    ]
    return (arm, str(len(fits)), *means, last)
