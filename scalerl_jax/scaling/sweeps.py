"""Laws over several runs at once, from the command line.

Model sizes (Tan et al.), rollouts per prompt (IsoCompute), losses of pre-training
(Kaplan et al., Chinchilla).  Every run's setting is a column of its file; of the first
two it has one value per run, of the last one per row.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_jax.scaling.columns import Selection
from scalerl_jax.scaling.curves import Curve, CurveError
from scalerl_jax.scaling.flags import selection_from
from scalerl_jax.scaling.isocompute import SweepRun, fit_isocompute
from scalerl_jax.scaling.laws import Array
from scalerl_jax.scaling.load import load_columns
from scalerl_jax.scaling.plateau import fit_plateau
from scalerl_jax.scaling.pretraining import (
    TWO_INPUT_LAWS,
    compute_optimal,
    fit_chinchilla,
    fit_kaplan_one,
)
from scalerl_jax.scaling.surfaces import SurfaceFit
from scalerl_jax.scaling.tables import is_step
from scalerl_jax.scaling.tan import (
    TanExtrapolation,
    TanFit,
    extrapolate_inter,
    extrapolate_intra,
    fit_tan,
)
from scalerl_jax.scaling.text import number, show, table

Curves = list[tuple[Path, Curve]]
Said = tuple[str, dict[str, Any]]


def _size_points(flags: argparse.Namespace, curves: Curves) -> tuple[Array, ...]:
    """Model size, x and error of all points of all runs."""
    parts = [
        (np.full(curve.x.size, curve.constants[flags.model_size]), curve.x, 1 - curve.y)
        for _, curve in curves
    ]
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


def _surface_text(found: TanFit | SurfaceFit, what: str) -> str:
    """The parameters of a law over several inputs."""
    rows = [
        (p.name, f"{p.value:.4g}", show(p.interval), p.unit, p.meaning)
        for p in found.parameters.values()
    ]
    verdict = "" if found.identified else "not identified: see the warnings\n"
    if not found.converged:
        verdict = "the search did not converge: no number here is to be used\n"
    return (
        f"{found.formula}\n{what}, {found.num_points} points; "
        f"R^2 {found.r_squared:.4f}\n"
        + table(("", "value", f"{100 * found.level:g} %", "unit", "meaning"), rows)
        + verdict
        + "".join(f"warning: {warning}\n" for warning in found.warnings)
    )


def sizes_text(flags: argparse.Namespace, curves: Curves) -> Said:
    """A law of Tan et al. over runs of several model sizes."""
    size, x, error = _size_points(flags, curves)
    if flags.law == "tan_plateau":
        found = fit_plateau(size, x, error, level=flags.level)
    else:
        x_name = curves[0][1].x_name
        found = fit_tan(size, x, error, x_name=x_name, level=flags.level)
    what = f"over {curves[0][1].x_name}, {np.unique(size).size} model sizes"
    return _surface_text(found, what), found.to_record()


def size_extrapolation_text(flags: argparse.Namespace, curves: Curves) -> Said:
    """Tan et al.'s two protocols: their own later points, and the largest model."""
    points, x_name = _size_points(flags, curves), curves[0][1].x_name
    tests: list[TanExtrapolation] = [
        extrapolate_intra(*points, num_first=flags.num_first, x_name=x_name)
    ]
    notes = ["intra-model: every size fitted on its first points, the rest predicted"]
    if np.unique(points[0]).size > 2:
        tests += [
            extrapolate_inter(*points, x_name=x_name),
            extrapolate_inter(*points, num_intercept=flags.num_first, x_name=x_name),
        ]
        notes += [
            "inter-model: all sizes but the largest fitted; its slope is predicted, "
            "its E is taken from its own first points ('E from'; the paper: from all)"
        ]
    else:
        notes += ["inter-model: needs three model sizes"]
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
    header = ("protocol", "fitted", "predicted", "E from", "mean |error|", "R^2")
    said = f"Tan et al.'s law over {x_name}; errors of 1 - pass rate\n"
    said += table(header, rows) + "".join(f"  {note}\n" for note in notes)
    return said, {"tests": [test.to_record() for test in tests]}


def loss_text(flags: argparse.Namespace) -> Said:
    """A law of pre-training loss over the rows of a table."""
    columns, what, notes = _loss_columns(flags)
    fitted = fit_kaplan_one if flags.law == "kaplan_one" else TWO_INPUT_LAWS[flags.law]
    found = _noted(fitted(*columns, level=flags.level), notes)
    return _surface_text(found, what), found.to_record()


def _noted(found: SurfaceFit, notes: tuple[str, ...]) -> SurfaceFit:
    """The fit with what reading its points had to say."""
    return dataclasses.replace(found, warnings=(*notes, *found.warnings))


def chinchilla_text(flags: argparse.Namespace) -> Said:
    """The best model size and number of tokens for budgets of FLOPs."""
    columns, what, notes = _loss_columns(flags)
    found = _noted(fit_chinchilla(*columns, level=flags.level), notes)
    said = _surface_text(found, what)
    record = found.to_record() | {"allocations": []}
    for flops in flags.flops:
        size, tokens = (float(value) for value in compute_optimal(found, flops))
        loss = float(found.predict(size, tokens))
        record["allocations"].append(
            {"flops": flops, "model_size": size, "tokens": tokens, "loss": loss}
        )
        said += (
            f"{flops:g} FLOPs: N = {size:.4g} parameters, D = {tokens:.4g} tokens, "
            f"loss {loss:.4f}\n"
        )
    return said, record


def _loss_columns(
    flags: argparse.Namespace,
) -> tuple[list[Array], str, tuple[str, ...]]:
    """Model size (unless the law has none), x, and loss of every row; what, notes.

    A power law has no value at x = 0, which a run's first evaluation may be at.
    """
    named = {"--x": flags.x, "--y": flags.y}
    if getattr(flags, "law", None) != "kaplan_one":
        named = {"--model-size": flags.model_size, **named}
    missing = [flag for flag, name in named.items() if name is None and flag != "--x"]
    if missing:
        raise CurveError(
            f"a law of loss needs its columns: name them with {', '.join(missing)} "
            "(--x: tokens, or for kaplan_one any quantity; --y: loss)"
        )
    selection = selection_from(flags)
    parts = [load_columns(path, named, selection) for path in flags.paths]
    columns = [
        np.concatenate(each) for each in zip(*(p.values for p in parts), strict=True)
    ]
    *_, x_name, y_name = parts[0].names
    positive = columns[-2] != 0
    notes = tuple(note for part in parts for note in part.notes)
    if not positive.all():
        count = int((~positive).sum())
        notes += (f"{count} rows at {x_name} = 0 left out: a power law has none there",)
    columns = [column[positive] for column in columns]
    columns[-2] = flags.x_scale * columns[-2]
    return columns, f"loss {y_name} over {x_name}", notes


def isocompute_text(flags: argparse.Namespace, curves: Curves) -> Said:
    """How to spend a budget of rollouts, by a sweep of runs."""
    columns = flags.rollouts_per_prompt, flags.prompts_per_step
    runs = []
    for _, curve in curves:
        n, prompts = (round(curve.constants[column]) for column in columns)
        # A step is B_p prompts with n rollouts each.
        scale = n * prompts if is_step(curve.x_name) else 1
        runs.append(
            SweepRun(
                rollouts_per_prompt=n,
                prompts_per_step=prompts,
                compute=scale * curve.x,
                reward=curve.y,
            )
        )
    found = fit_isocompute(runs, bin_width=flags.bin_width, level=flags.level)

    def shown(interval: Any) -> str:
        return "no interval" if interval is None else show(interval)

    rows = [
        (name, f"{value:.4g}", shown(found.intervals[name]))
        for name, value in found.parameters.items()
    ]
    said = (
        f"IsoCompute: log2 n*(C) = low + (high - low) / (1 + (C0 / C)^k), C in "
        f"rollouts; n tested: {', '.join(map(str, found.tested))}\n"
        + table(("", "value", f"{100 * found.level:g} %"), rows)
    )
    record = found.to_record() | {"allocations": []}
    for budget in flags.budget:
        plan = found.allocate(budget)
        record["allocations"].append(plan.to_record())
        beyond = ", beyond the data" if plan.beyond_data else ""
        said += (
            f"{budget:g} rollouts{beyond}: n = {plan.rollouts_per_prompt} "
            f"(n* {plan.optimal:.4g} {shown(plan.optimal_interval)}), "
            f"B_p = {plan.prompts_per_step}, M = {plan.steps} steps, reward "
            f"{plan.reward:.4f}\n"
        )
    if "no interval" in said:
        said += f"no interval: {found.no_interval}\n"
    return said + "".join(f"warning: {w}\n" for w in found.warnings), record


def selection_with(flags: argparse.Namespace, **settings: str | None) -> Selection:
    """The flags' selection, which also reads these settings of every run."""
    missing = [flag for flag, column in settings.items() if column is None]
    if missing:
        flags_missing = " and ".join(f"--{flag.replace('_', '-')}" for flag in missing)
        raise CurveError(
            f"the runs' settings are asked for: name their columns with {flags_missing}"
        )
    named = tuple(column for column in settings.values() if column is not None)
    return dataclasses.replace(selection_from(flags), constants=named)
