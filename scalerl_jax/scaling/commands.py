"""What each command of `python -m scalerl_jax.scaling` does: read, call, print, write.

Every function takes the parsed flags and returns an exit status; what it prints is
made in `text.py`, and what it draws in `figure.py`.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl_jax.scaling import text
from scalerl_jax.scaling.curves import Curve, CurveError, TooFewPointsError
from scalerl_jax.scaling.fit import sensitivity
from scalerl_jax.scaling.flags import fit_one, read, selection_from, settings_from
from scalerl_jax.scaling.options import LOSS_LAWS, SIZE_LAWS
from scalerl_jax.scaling.own_runs import on_a_cpu, when_enough
from scalerl_jax.scaling.readers import EVALS_NAME
from scalerl_jax.scaling.records import to_plain
from scalerl_jax.scaling.result import Fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scalerl_jax.scaling.bootstrap import Bootstrap
    from scalerl_jax.scaling.ranking import RunTable

PICTURES = (".png", ".svg")


def fit(flags: argparse.Namespace) -> int:
    """Fit every curve; a run directory gets fit.json and fit.png."""
    _check_out(flags.out)
    if flags.model_size is not None or flags.law in (*SIZE_LAWS, *LOSS_LAWS):
        return _fit_together(flags)
    texts, records = [], []
    fits: dict[str, Fit] = {}
    written: list[Path] = []
    for path, curve in read(flags):
        try:
            result = fits[curve.name] = fit_one(curve, flags)
        except TooFewPointsError as failure:
            raise CurveError(
                f"{failure}{when_enough(path, failure.missing)}"
            ) from failure
        said, record = _with_extras(result, curve, flags)
        texts.append(said)
        records.append(record)
        if (path / EVALS_NAME).is_file():
            texts[-1] += on_a_cpu(path, curve)
            written += _write_beside(path, result, record)
    if flags.out is not None:
        from scalerl_jax.scaling.figure import draw_fits

        _save(draw_fits(list(fits.values()), list(fits)), flags.out)
        written.append(flags.out)
    record = _one_or_all(records)
    if flags.pool:
        from scalerl_jax.scaling.seeds import pool_seeds

        pooled = pool_seeds(list(fits.values()))
        texts.append(text.pooled_text(pooled))
        record = {"seeds": records, "pooled": pooled.to_record()}
    _print(flags, "\n".join(texts), record, written)
    if flags.json:
        for result in fits.values():
            for warning in result.warnings:
                sys.stderr.write(f"warning: {warning}\n")
    return 0


def _fit_together(flags: argparse.Namespace) -> int:
    """One law over all runs: of model sizes, or of pre-training loss."""
    from scalerl_jax.scaling import sweeps

    if flags.law in LOSS_LAWS:
        _print(flags, *sweeps.loss_text(flags), [])
        return 0
    if flags.law not in (None, *SIZE_LAWS):
        raise CurveError(
            f"--law {flags.law} is of one run; with --model-size choose one of "
            f"{', '.join((*SIZE_LAWS, *LOSS_LAWS))}"
        )
    selection = sweeps.selection_with(flags, model_size=flags.model_size)
    _print(flags, *sweeps.sizes_text(flags, read(flags, selection)), [])
    return 0


def compare(flags: argparse.Namespace) -> int:
    """Every pair by rule and test; more than two runs also as a ranked table."""
    from scalerl_jax.scaling.compare import compare as compare_two
    from scalerl_jax.scaling.ranking import compare_many

    _check_out(flags.out)
    curves = {curve.name: curve for _, curve in read(flags)}
    fits = {name: fit_one(curve, flags) for name, curve in curves.items()}
    if len(fits) < 2:
        raise CurveError(
            f"compare needs two curves or more, and found {', '.join(fits)}; give more "
            "paths, or --group for the runs of one file"
        )
    runs = compare_many(fits, margin=flags.margin)
    parts = [text.runs_text(runs)]
    record: dict[str, Any] = {"runs": runs.to_record()}
    # The paper compares a few recipes with each other, and many with the best one.
    best = runs.rows[0].name
    pairs = (
        list(itertools.combinations(fits, 2))
        if len(fits) <= 4
        else [(best, name) for name in fits if name != best]
    )
    found = [
        compare_two(
            fits[a],
            fits[b],
            names=(a, b),
            margin=flags.margin,
            num_resamples=flags.resamples,
            prompt_rates=_paired(curves[a], curves[b], fits[a], fits[b]),
        )
        for a, b in pairs
    ]
    parts += [text.comparison_text(comparison) for comparison in found]
    record["pairs"] = [comparison.to_record() for comparison in found]
    written = _draw_slopes(runs, list(fits), flags.out)
    _print(flags, "\n".join(parts), record, written)
    return 0


def _draw_slopes(runs: "RunTable", names: list[str], out: Path | None) -> list[Path]:
    """The linearised curves, where the runs have an A to share."""
    if out is None:
        return []
    if runs.shared_asymptote is None:
        sys.stderr.write(
            f"warning: {out} is not written: A is identified for no run, so there is "
            "none at which their slopes could be compared\n"
        )
        return []
    from scalerl_jax.scaling.figure import draw_linearised

    _save(draw_linearised(runs, names=names), out)
    return [out]


def _paired(
    a: Curve, b: Curve, fit_a: Fit, fit_b: Fit
) -> tuple[np.ndarray, np.ndarray] | None:
    """Pass rates per prompt at the fitted points, where both runs have them."""
    from scalerl_jax.scaling.bootstrap import fitted_rates

    if a.prompt_rates is None or b.prompt_rates is None:
        return None
    if a.prompt_rates.shape[1] != b.prompt_rates.shape[1]:
        return None
    return fitted_rates(a, fit_a), fitted_rates(b, fit_b)


def extrapolate(flags: argparse.Namespace) -> int:
    """Fit the first part of every curve, predict the rest."""
    from scalerl_jax.scaling.extrapolate import extrapolate_curve

    _check_out(flags.out)
    if flags.model_size is not None:
        from scalerl_jax.scaling import sweeps

        selection = sweeps.selection_with(flags, model_size=flags.model_size)
        curves = read(flags, selection)
        _print(flags, *sweeps.size_extrapolation_text(flags, curves), [])
        return 0
    texts, records, figures = [], [], []
    for _, curve in read(flags):
        try:
            found = extrapolate_curve(
                curve, fractions=flags.fractions, settings=settings_from(flags)
            )
        except CurveError as failure:
            raise CurveError(f"{curve.name}: {failure}") from failure
        texts.append(text.extrapolation_text(found, curve.name))
        records.append({"name": curve.name, **found.to_record()})
        figures.append((curve.name, found))
    written = []
    if flags.out is not None:
        from scalerl_jax.scaling.forecast_figure import draw_extrapolation

        for number, (name, found) in enumerate(figures):
            path = flags.out
            if number:
                path = path.with_stem(f"{path.stem}-{number + 1}")
            _save(draw_extrapolation(found, title=name), path)
            written.append(path)
    _print(flags, "\n".join(texts), _one_or_all(records), written)
    return 0


def plan(flags: argparse.Namespace) -> int:
    """What more compute would bring to every curve."""
    from scalerl_jax.scaling.plan import plan as make_plan

    if flags.flops or flags.budget:
        return _plan_sweep(flags)
    texts, records = [], []
    for _, curve in read(flags):
        found = make_plan(
            fit_one(curve, flags),
            target=flags.target,
            price_per_chip_hour=flags.price,
            value_of_a_point=flags.point_value,
            stop_below=flags.stop_below,
        )
        texts.append(text.plan_text(found, curve.name))
        records.append({"name": curve.name, **found.to_record()})
    _print(flags, "\n".join(texts), _one_or_all(records), [])
    return 0


def _plan_sweep(flags: argparse.Namespace) -> int:
    """How to spend a budget, by runs that spent theirs differently."""
    from scalerl_jax.scaling import sweeps

    if flags.flops:
        _print(flags, *sweeps.chinchilla_text(flags), [])
        return 0
    selection = sweeps.selection_with(
        flags,
        rollouts_per_prompt=flags.rollouts_per_prompt,
        prompts_per_step=flags.prompts_per_step,
    )
    _print(flags, *sweeps.isocompute_text(flags, read(flags, selection)), [])
    return 0


def watch(flags: argparse.Namespace) -> int:
    """Follow one run."""
    from scalerl_jax.scaling.watch import BOARD_DIRECTORY, Watch
    from scalerl_jax.scaling.watch import watch as follow

    logdir = flags.logdir
    if logdir is None and flags.path.is_dir():
        logdir = flags.path / BOARD_DIRECTORY
    run = Watch(
        path=flags.path,
        selection=selection_from(flags),
        horizon=flags.until,
        patience=flags.patience,
        level=flags.level,
        alarm_level=flags.alarm_level,
        logdir=None if flags.no_tensorboard else logdir,
    )
    try:
        return follow(run, every_s=flags.every, once=flags.once)
    except KeyboardInterrupt:
        return 0


def report(flags: argparse.Namespace) -> int:
    """One HTML page of all curves."""
    from scalerl_jax.scaling.report import make_report

    _check_out(flags.out, (".html",))
    curves = [curve for _, curve in read(flags)]
    fits = {curve.name: fit_one(curve, flags) for curve in curves}
    page = make_report(fits, title=flags.title)
    flags.out.write_text(page, encoding="utf-8")
    records = [{"name": name, **result.to_record()} for name, result in fits.items()]
    said = "".join(f"{name}: {_verdict(fit)}\n" for name, fit in fits.items())
    _print(flags, said, _one_or_all(records), [flags.out])
    return 0


def _write_beside(folder: Path, result: Fit, record: dict[str, Any]) -> list[Path]:
    """fit.json and fit.png of a run directory."""
    from scalerl_jax.scaling.axes import to_png
    from scalerl_jax.scaling.figure import draw_fits

    name = result.curve.name
    numbers, picture = folder / "fit.json", folder / "fit.png"
    numbers.write_text(_to_json(record), encoding="utf-8")
    picture.write_bytes(to_png(draw_fits([result], [name], title=name)))
    return [numbers, picture]


def _with_extras(
    result: Fit, curve: Curve, flags: argparse.Namespace
) -> tuple[str, dict[str, Any]]:
    """Text and record of a fit, with what else was asked for."""
    said = text.fit_text(result, curve.name)
    record = {"name": curve.name, **result.to_record()}
    if flags.sensitivity:
        rows = sensitivity(result)
        said += text.sensitivity_text(result, rows)
        record["sensitivity"] = to_plain(rows)
    if flags.bootstrap:
        from scalerl_jax.scaling.bootstrap import bootstrap

        found = bootstrap(result, num_resamples=flags.bootstrap)
        said += text.bootstrap_text(found)
        record["bootstrap"] = found.to_record()
        if curve.prompt_rates is not None and result.law == "sigmoid":
            nested = _nested_bootstrap(result, curve, flags.bootstrap)
            said += text.bootstrap_text(nested)
            record["prompt_bootstrap"] = nested.to_record()
    return said, record


def _nested_bootstrap(result: Fit, curve: Curve, num_resamples: int) -> "Bootstrap":
    """Over the evaluation's prompts, and samples where their number is known."""
    from scalerl_jax.scaling.bootstrap import bootstrap_prompts, fitted_rates

    x = result.curve.x
    if result.problem.observes_zero:
        x = np.append(0.0, x)
    return bootstrap_prompts(
        x,
        fitted_rates(curve, result),
        num_samples=curve.samples_per_prompt,
        settings=result.settings,
        num_resamples=num_resamples,
    )


def _verdict(result: Fit) -> str:
    """A with its interval, or why there is none."""
    if "A" not in result.parameters:
        return f"R^2 {result.r_squared:.4f}"
    return f"A {text.parameter_text(result, result.parameters['A'])}"


def _one_or_all(records: list[dict[str, Any]]) -> Any:
    """One result as an object, several as a list of them."""
    return records[0] if len(records) == 1 else records


def _to_json(record: Any) -> str:
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


def _print(
    flags: argparse.Namespace, said: str, record: Any, written: Sequence[Path]
) -> None:
    """JSON, or text with what was written."""
    if flags.json:
        sys.stdout.write(_to_json(record))
        return
    sys.stdout.write(said)
    if written:
        sys.stdout.write(f"wrote {', '.join(str(path) for path in written)}\n")


def _check_out(path: Path | None, endings: tuple[str, ...] = PICTURES) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if path is None:
        return
    if path.suffix not in endings:
        raise CurveError(
            f"--out {path}: give a name that ends in {' or '.join(endings)}"
        )
    if not path.resolve().parent.is_dir():
        raise CurveError(f"--out {path}: there is no directory {path.parent}; make it")


def _save(figure: "Figure", path: Path) -> None:
    from scalerl_jax.scaling.axes import to_png, to_svg

    path.write_bytes(to_png(figure) if path.suffix == ".png" else to_svg(figure))
