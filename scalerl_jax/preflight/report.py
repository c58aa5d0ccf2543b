"""The result of a check as text and as a JSON object, and a table of several checks:

python -m scalerl_jax.preflight.report

checks the shipped configs on TPUs and GPUs that suit them, and prints Markdown.
"""

import dataclasses
import os
import subprocess
import sys
from typing import Any

from scalerl_jax import config as config_lib
from scalerl_jax.formats.reading import parse_json
from scalerl_jax.machines.chips import MEMORY_FRACTION
from scalerl_jax.preflight.check import (
    Checked,
    CheckedConfig,
    below_float32,
    decode_context,
    estimate_largest,
    head_is_float32,
    router_is_float32,
)
from scalerl_jax.preflight.collectives import Traffic
from scalerl_jax.preflight.figures import amount, duration, gib
from scalerl_jax.preflight.notes import advice, notes
from scalerl_jax.preflight.topologies import parse_topology
from scalerl_jax.preflight.whole_step import step_json, step_lines
from scalerl_jax.process.child_environment import own_python
from scalerl_jax.process.printing import to_stdout
from scalerl_jax.wiring.devices import is_shared

_OTHERS = ("prefill", "decode", "publish")  # programs outside the train step
# (config, topology) of the table's rows.
_CASES = (
    ("8b", "v5p:4x4x4"),
    ("8b", "v5e:8x8"),
    ("8b", "v5e:16x16"),
    ("8b", "v6e:8x8"),
    ("8b", "v5p:2x2x1"),
    ("8b_lora", "v5e:2x4"),
    ("8b_lora", "v5p:2x2x1"),
    ("8b_32k", "v5p:4x4x4"),
    ("8b_32k", "v6e:8x8"),
    ("32b", "v5p:4x4x8"),
    ("32b", "v6e:16x16"),
    ("qwen3_30b_a3b", "v5p:4x4x4"),
    ("qwen3_30b_a3b", "v6e:8x8"),
    ("scout", "v5p:4x4x8"),
    ("scout", "v6e:16x16"),
    ("8b", "2*v6e:16x16"),
    ("32b", "2*v5p:4x4x8"),
    ("8b", "h100:8"),
    ("8b", "h200:8"),
    ("8b_lora", "h100:1"),
    ("8b_lora", "h200:1"),
)
# On GPUs attention reserves memory for each segment of a row, and JAX a share of all.
_GPU_FLAGS = ("--config.batch.row_segments=8",)
_GPU_SHARE = {MEMORY_FRACTION: "0.92"}
_HEADER = (
    "| config | topology | learner + generators | can start | generate | train "
    "| of it DCN | at work | chip-hours a step | fits | limit | train step "
    "| prefill | decode |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def to_json(
    result: CheckedConfig, *, config_file: str, price: float | None = None
) -> dict[str, Any]:
    """Return the whole result; bytes are those of one device.

    With the `price` of a chip-hour, costs are also given in money.
    """
    parts = result.parts
    programs = {
        name: _program_json(name, each) for name, each in result.programs.items()
    }
    step = {name: programs.pop(name) for name in list(programs) if name not in _OTHERS}
    programs["prefill"]["note"] = (
        "prefill samples no token and has no head; a prompt's last token is decoded"
    )
    programs["publish"] |= {
        "float32_head": True,
        "note": "a copy, by arithmetic: it has no head",
    }
    return {
        "fits": result.fits,
        "can_start": parts.fitted.can_start,
        "why_not_start": parts.fitted.why_not,
        "processes": parts.fitted.processes,
        **step_json(result.whole, price=price),
        "config": config_file,
        "settings": config_lib.to_json(parts.config),
        "topology": result.topology.name,
        "devices": {
            "all": result.topology.num_devices,
            "learner": parts.learner_mesh.size,
            "sampler": parts.sampler_mesh.size,
            "generators": parts.config.generators.count,
            "shared": is_shared(parts.config),
            "unused": parts.placement.unused,
            "learner_topology": parts.placement.learner.name,
            "sampler_topology": parts.placement.sampler.name,
        },
        "hbm_limit_bytes": result.limit,
        "attention": result.attention,
        "microbatches": result.microbatches,
        "num_params": parts.arch.num_params,
        "num_active_params": parts.arch.num_active_params,
        "largest_estimated": estimate_largest(result),
        "advice": advice(result),
        "notes": notes(result),
        "programs": {"train_step": _step_json(result) | {"programs": step}} | programs,
    }


def _program_json(name: str, each: Checked) -> dict[str, Any]:
    roofline = dataclasses.asdict(each.roofline) | {"bound_by": each.roofline.bound_by}
    return {
        "peak_bytes": each.peak_bytes,
        "memory": each.parts,
        "too_large": each.too_large,
        "collectives": _traffic_json(each.traffic),
        "flops": each.work.flops,
        "head_flops": each.work.head,
        "hbm_bytes": each.work.bytes,
        "roofline_seconds": each.roofline.seconds,
        "roofline": roofline,
        "float32_head": head_is_float32(name, each.head),
        "excess_products": [
            {"place": found.place, "ratio": found.ratio} for found in each.excesses
        ],
        "narrow_sums": list(each.narrow),
        "float32_router": router_is_float32(each.router),
    }


def _traffic_json(traffic: dict[str, Traffic]) -> dict[str, dict[str, float]]:
    return {kind: dataclasses.asdict(sums) for kind, sums in traffic.items()}


def _of_step(result: CheckedConfig) -> list[Checked]:
    """Return the programs of an optimizer step."""
    return [each for name, each in result.programs.items() if name not in _OTHERS]


def _step_json(result: CheckedConfig) -> dict[str, Any]:
    """Return an optimizer step: sums over its programs, and their greatest peak."""
    step = _of_step(result)
    fullest = max(step, key=lambda one: one.peak_bytes)
    sums: dict[str, Traffic] = {}
    for one in step:
        for kind, found in one.traffic.items():
            total = sums.setdefault(kind, Traffic())
            for name, value in vars(found).items():
                setattr(total, name, getattr(total, name) + value * one.calls)
    return {
        "peak_bytes": fullest.peak_bytes,
        "memory": fullest.parts,
        "too_large": " ".join(one.too_large for one in step).strip(),
        "collectives": _traffic_json(sums),
        "flops": sum(one.work.flops * one.calls for one in step),
        "head_flops": sum(one.work.head * one.calls for one in step),
        "roofline_seconds": _step_seconds(result),
        "float32_head": head_is_float32(
            "accumulate", result.programs["accumulate"].head
        ),
        "float32_router": router_is_float32(result.programs["accumulate"].router),
    }


def _step_seconds(result: CheckedConfig) -> float:
    """Return the seconds of an optimizer step: the sum of its programs' rooflines."""
    return sum(one.roofline.seconds * one.calls for one in _of_step(result))


def to_text(
    result: CheckedConfig, *, config_file: str, price: float | None = None
) -> str:
    """Return the result as text; with the `price` of a chip-hour, also in money."""
    parts, limit = result.parts, result.limit
    mesh = parts.config.mesh
    lines = [
        f"{config_file} on {result.topology.name}: "
        f"{'fits' if result.fits else 'DOES NOT FIT'} "
        f"({gib(limit)} of HBM for programs on each device)",
        f"devices: learner {parts.learner_mesh.size} ("
        + f"slices {mesh.slices}, " * (mesh.slices > 1)
        + f"data {mesh.data}, fsdp "
        f"{mesh.fsdp}, context {mesh.context}, tensor {mesh.tensor}), sampler "
        + ("shares " if is_shared(parts.config) else "")
        + f"{parts.sampler_mesh.size} x {parts.config.generators.count}"
        + f", unused {parts.placement.unused}",
        f"attention: learner {result.attention['learner']}; sampler "
        f"{result.attention['sampler']}",
        "",
    ]
    for name, each in result.programs.items():
        lines += _memory_lines(name, each, limit)
    lines += _cost_lines(result)
    lines += step_lines(result.whole, parts.fitted, price=price)
    found = estimate_largest(result)
    if found:
        lines.append(
            f"estimate: up to batch.rows_per_microbatch = "
            f"{found['rows_per_microbatch']} (now "
            f"{parts.config.batch.rows_per_microbatch}), or batch.row_tokens = "
            f"{found['row_tokens']} (now {parts.config.batch.row_tokens}), with "
            f"temporaries in proportion to tokens"
        )
    if changes := advice(result):
        lines += ["", "what to change, the largest part first:"]
        lines += [f"  - {line}" for line in changes]
    lines += ["", *(f"note: {line}" for line in notes(result))]
    return "\n".join(lines) + "\n"


def _memory_lines(name: str, each: Checked, limit: int) -> list[str]:
    verdict = "" if each.peak_bytes <= limit and not each.too_large else "  TOO LARGE"
    least = " or more" if each.too_large else ""
    lines = [f"{name}: {gib(each.peak_bytes)}{least} of {gib(limit)}{verdict}"]
    for part, size in sorted(each.parts.items(), key=lambda one: -one[1]):
        if size >= 2**20:
            lines.append(f"    {gib(size):>10}  {part}")
    if each.too_large:
        lines.append(f"    the compiler: {each.too_large}")
    return lines


def _cost_lines(result: CheckedConfig) -> list[str]:
    width = max(17, *map(len, result.programs))
    lines = [
        "",
        f"{'program':<{width}} {'calls':>5} {'TFLOP':>10} {'of it head':>10} "
        f"{'compute':>8} {'HBM':>8} {'ICI':>8} {'DCN':>8}  bound by  head",
    ]
    for name, each in result.programs.items():
        if name == "publish":
            continue
        cost = each.roofline
        head = "" if each.head is None else "float32, highest precision"
        if each.head is not None and each.head.high:
            head = f"float32; {each.head.high} for gradients, of 16 bits"
        if each.head is not None and not head_is_float32(name, each.head):
            head = f"{below_float32(name, each.head)} matmuls BELOW float32"
        if name == "prefill" and each.head is not None and not each.head.highest:
            head = "none: it samples no token"
        lines.append(
            f"{name:<{width}} {each.calls:>5} {amount(each.work.flops / 1e12):>10} "
            f"{amount(each.work.head / 1e12):>10} {duration(cost.compute):>8} "
            f"{duration(cost.hbm):>8} {duration(cost.ici):>8} "
            f"{duration(cost.dcn):>8}  "
            f"{cost.bound_by:<8}  {head}"
        )
    for name, each in result.programs.items():
        if each.router is not None:
            exact, lower = each.router.highest, each.router.below_float32()
            verdict = (
                f"{lower} BELOW float32" if lower else "float32, highest precision"
            )
            lines.append(f"router of {name}: {exact + lower} matmuls, {verdict}")
    lines += ["", "collectives of a device and call:"]
    for name, each in result.programs.items():
        for kind, sums in sorted(each.traffic.items()):
            lines.append(
                f"    {name:<{width}} {kind:<19} {sums.count:>7} x  "
                f"{gib(sums.bytes):>10}  sends {gib(sums.sent_bytes)}"
                + f", {gib(sums.dcn_bytes)} between slices"
                * (sums.dcn_bytes > 0)
            )
    lines += [""] + (_product_lines(result) or ["products cost the requested FLOPs"])
    settings = result.parts.engine.settings
    work = result.programs["accumulate"].work
    tokens = result.programs["decode"]
    rate = settings.slots * settings.tokens_per_call / tokens.roofline.seconds
    lines += [
        "",
        f"optimizer step: {duration(_step_seconds(result))} or more "
        f"({result.microbatches} microbatches if every rollout has the maximal length)",
        f"its head: {1 - work.layers / work.passes:.0%} of the matrix units' work",
        f"decoding: {rate:,.0f} tokens/s or less from a sampler with "
        f"{settings.slots} slots of {decode_context(result.parts):,.0f} tokens",
    ]
    return lines


def _product_lines(result: CheckedConfig) -> list[str]:
    """Return a line for each product that the compiler made costly or inexact."""
    return [
        f"{name}: products of {_in_package(found.place)} take {found.ratio:.1f}x the "
        f"requested FLOPs"
        for name, each in result.programs.items()
        for found in each.excesses
    ] + [
        f"{name}: products of {_in_package(place)} are summed BELOW float32"
        for name, each in result.programs.items()
        for place in each.narrow
    ]


def _in_package(place: str) -> str:
    """Return a source line's path from the package on."""
    return place[max(place.rfind("scalerl_jax/"), 0) :]


def row(config: str, answer: dict) -> str:
    """Return a line of the table; memory is the fullest device's, in GiB."""
    programs, devices = answer["programs"], answer["devices"]
    memory = " | ".join(
        f"{programs[name]['peak_bytes'] / 2**30:.1f}"
        for name in ("train_step", "prefill", "decode")
    )
    start, fits = ("yes" if answer[name] else "no" for name in ("can_start", "fits"))
    return (
        f"| `{config}.py` | {answer['topology']} | {devices['learner']} + "
        f"{devices['generators']} x {devices['sampler']} | {start} | "
        f"{answer['generate_seconds']:.0f} s | {answer['train_seconds']:.0f} s | "
        f"{answer['dcn_seconds']:.2g} s | "
        f"{answer['busy_share']:.0%} | {answer['chip_hours_per_step']:.2f} | {fits} | "
        f"{answer['hbm_limit_bytes'] / 2**30:.2f} | {memory} |\n"
    )


def main() -> int:
    """Print the table; return 0 if everything fits."""
    to_stdout(_HEADER)
    status = 0
    for config, topology in _CASES:
        command = [*own_python(), "-m", "scalerl_jax.preflight", "--json"]
        command += [f"--config=configs/{config}.py", f"--topology={topology}"]
        if "*" in topology:  # a learner over all of them
            slices = topology.partition("*")[0]
            command.append(f"--config.mesh.slices={slices}")
        gpus = parse_topology(topology).chip.platform == "gpu"
        done = subprocess.run(
            [*command, *(_GPU_FLAGS if gpus else ())],
            env=os.environ | (_GPU_SHARE if gpus else {}),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.stdout:
            to_stdout(row(config, parse_json(done.stdout)))
            sys.stdout.flush()
        status = max(status, done.returncode)
    return status


if __name__ == "__main__":
    sys.exit(main())
