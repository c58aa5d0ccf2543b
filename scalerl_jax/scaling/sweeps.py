"""Laws over several runs at once, from the command line: Tan et al., IsoCompute.

Every run's setting (model size, rollouts per prompt, prompts per step) is a column of
its file, with one value per run.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_jax.scaling.curves import Curve, CurveError
from scalerl_jax.scaling.isocompute import SweepRun, fit_isocompute
from scalerl_jax.scaling.load import Selection
from scalerl_jax.scaling.options import selection_from
from scalerl_jax.scaling.tables import STEP_COLUMN
from scalerl_jax.scaling.tan import fit_tan
from scalerl_jax.scaling.text import show, table

Curves = list[tuple[Path, Curve]]


def tan_text(flags: argparse.Namespace, curves: Curves) -> tuple[str, dict[str, Any]]:
    """Tan et al.'s law over runs of several model sizes."""
    sizes, x, error = (
        np.concatenate(parts)
        for parts in zip(
            *(
                (
                    np.full(curve.x.size, curve.constants[flags.model_size]),
                    curve.x,
                    1.0 - curve.y,
                )
                for _, curve in curves
            ),
            strict=True,
        )
    )
    found = fit_tan(sizes, x, error, x_name=curves[0][1].x_name, level=flags.level)
    rows = [
        (p.name, f"{p.value:.4g}", show(p.interval), p.unit, p.meaning)
        for p in found.parameters.values()
    ]
    verdict = "" if found.identified else "k_max and N0 are not identified\n"
    said = (
        f"{found.formula} over {found.x_name}, {found.num_points} points of "
        f"{len(found.sizes)} model sizes; R^2 {found.r_squared:.4f}\n"
        + table(("", "value", f"{100 * found.level:g} %", "unit", "meaning"), rows)
        + verdict
        + "".join(f"warning: {warning}\n" for warning in found.warnings)
    )
    return said, found.to_record()


def isocompute_text(
    flags: argparse.Namespace, curves: Curves
) -> tuple[str, dict[str, Any]]:
    """How to spend a budget of rollouts, by a sweep of runs."""
    columns = flags.rollouts_per_prompt, flags.prompts_per_step
    runs = []
    for _, curve in curves:
        n, prompts = (round(curve.constants[column]) for column in columns)
        # A step is B_p prompts with n rollouts each.
        scale = n * prompts if curve.x_name == STEP_COLUMN else 1
        runs.append(
            SweepRun(
                rollouts_per_prompt=n,
                prompts_per_step=prompts,
                compute=scale * curve.x,
                reward=curve.y,
            )
        )
    found = fit_isocompute(runs, bin_width=flags.bin_width, level=flags.level)
    rows = [
        (name, f"{value:.4g}", show(found.intervals[name]))
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
            f"(n* {plan.optimal:.4g} {show(plan.optimal_interval)}), "
            f"B_p = {plan.prompts_per_step}, M = {plan.steps} steps, reward "
            f"{plan.reward:.4f}\n"
        )
    return said + "".join(f"warning: {w}\n" for w in found.warnings), record


def selection_with(flags: argparse.Namespace, *columns: str | None) -> Selection:
    """The flags' selection, which also reads these settings of every run."""
    named = tuple(column for column in columns if column is not None)
    if len(named) < len(columns):
        raise CurveError(
            "--budget needs the sweep's settings: name their columns with "
            "--rollouts-per-prompt and --prompts-per-step"
        )
    return dataclasses.replace(selection_from(flags), constants=named)
