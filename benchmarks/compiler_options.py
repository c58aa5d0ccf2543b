r"""The train step compiled by libtpu with each option of its compiler, one by one.

    python benchmarks/compiler_options.py --config=configs/8b.py \
        --topologies=v5p:4x4x4,v5e:16x16,v6e:8x8
    python benchmarks/compiler_options.py --decode=256,128,64 --topologies=v5p:4x4x4

Needs the TPU compiler (`pip install -e ".[tpu]"`) and no TPU.  Figures are the
compiler's own estimates of one microbatch: no time was measured.  Attention's kernels
and collectives have no estimate; how many of the latter are asynchronous is counted.

With `--decode` they are of a decode step with that number of slots, in the replicas
that the config gets: attention's kernel is assumed to read keys and values at the HBM's
peak, a collective to wait as long as `planning.rates` expects.
"""

import argparse
import collections
import dataclasses
import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scalerl_jax.preflight.__main__ import ENVIRONMENT

os.environ.update(ENVIRONMENT)

from scalerl_jax import config as config_lib
from scalerl_jax.parallel import compiling
from scalerl_jax.planning import work
from scalerl_jax.planning.lengths import assumed_lengths
from scalerl_jax.planning.rates import EXPECTED
from scalerl_jax.preflight.hlo import (
    Instruction,
    Program,
    above_default,
    compile_program,
)
from scalerl_jax.preflight.products import product_flops
from scalerl_jax.preflight.programs import make_parts
from scalerl_jax.preflight.topologies import parse_topology
from scalerl_jax.sampler.lowering import lower_generate

SHIPPED = dict(compiling.OPTIONS["learner"][""])
# Besides the default ones; the names are those of MaxText's published flags.
VARIANTS: dict[str, Mapping[str, bool | int]] = {
    "none": {},
    "shipped": SHIPPED,
    "asynchronous collectives in fusions": SHIPPED
    | {
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    },
    "products over collectives": SHIPPED
    | {"xla_tpu_overlap_compute_collective_tc": True},
    "asynchronous all-gathers": SHIPPED | {"xla_enable_async_all_gather": True},
    "all-reduces of data parallelism": SHIPPED
    | {
        "xla_tpu_enable_data_parallel_all_reduce_opt": True,
        "xla_tpu_data_parallel_opt_different_sized_ops": True,
    },
}
# Cycles per second at which the peaks of `machines.chips` are whole matrix units.
CLOCK = {"v5p": 1.75e9, "v5e": 1.5e9, "v6e": 1.75e9}
PRODUCTS = ("dot", "convolution")
CONTEXTS = (2_000, 8_000)  # tokens of a sequence, besides the assumed number
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")


def main() -> None:
    """Compile each variant on each topology, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/8b.py")
    parser.add_argument("--topologies", default="v5p:4x4x4,v5e:16x16,v6e:8x8")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--decode", default="", help="slots; in place of a train step")
    given = parser.parse_args()
    if given.decode:
        print_decode(given.config, given.topologies.split(","), given.decode.split(","))
        return
    print(
        "| topology | `model.remat` | options | linears, s | of the peak | head, s | "
        "all, s | collectives at once with others | peak memory, GiB |\n"
        + "|---" * 9
        + "|"
    )
    for name in given.topologies.split(","):
        for variant in given.variants.split(","):
            print(row(given.config, name, variant), flush=True)


def row(config_file: str, topology_name: str, variant: str) -> str:
    """Return the figures of one compilation, as a line of the table."""
    compiling.OPTIONS["learner"][""] = dict(VARIANTS[variant])
    config = config_lib.resolve(runpy.run_path(config_file)["get_config"]())
    topology = parse_topology(topology_name)
    parts, step = make_parts(config, topology)
    compiled = compile_program(variant, step.lower_accumulate())
    begin = f"| {topology_name} | {parts.config.model.remat} | {variant} | "
    if compiled.program is None:
        return begin + f"too large: {compiled.too_large[:80]} | | | | |"
    found = cycles(compiled.program)
    clock = CLOCK[topology.chip.name]
    linears = found["linears"] / clock
    share = found["flops"] / topology.chip.flops / linears
    apart = f"{found['asynchronous']:.0f} of {found['collectives']:.0f}"
    memory = (compiled.kept + compiled.temporaries) / 2**30
    return begin + (
        f"{linears:.2f} | {share:.0%} | {found['head'] / clock:.2f} | "
        f"{found['all'] / clock:.2f} | {apart} | "
        f"{memory:.1f} |"
    )


def print_decode(config_file: str, topologies: list[str], slots: list[str]) -> None:
    """Compile decode calls, and print the compiler's estimates of a step."""
    print(
        "| topology | chips of a replica | slots | products, us | of the peak | "
        "other, us | collectives | tokens held by a sequence | HBM's bound, us | "
        "expected, us | of the bound |\n" + "|---" * 11 + "|"
    )
    for name in topologies:
        for count in slots:
            for line in decode_rows(config_file, name, int(count)):
                print(line, flush=True)


def decode_rows(config_file: str, topology_name: str, slots: int) -> Iterator[str]:
    """Return the figures of a decode step at contexts of several lengths."""
    given = runpy.run_path(config_file)["get_config"]()
    config, topology = config_lib.resolve(given), parse_topology(topology_name)
    # The split that the config gets, with other slots and as large a cache.
    fitted = make_parts(config, topology)[0].config
    sampler = dataclasses.replace(fitted.sampler, slots=slots)
    parts, _ = make_parts(dataclasses.replace(fitted, sampler=sampler), topology)
    program = compile_program("decode", lower_generate(parts.engine)).program
    assert program is not None, "fewer slots than the config gets fit"
    chip, chips = topology.chip, parts.sampler_mesh.size
    us = 1e6 / CLOCK[chip.name] / sampler.tokens_per_call
    found = cycles(program)
    seconds, linears = found["all"] * us, (found["linears"] + found["head"]) * us
    peak = (
        (found["flops"] + found["head flops"])
        / sampler.tokens_per_call
        / chip.flops
        * 1e6
        / linears
    )
    collectives = round(found["collectives"] / sampler.tokens_per_call)
    latency = collectives * EXPECTED.collective_s * 1e6
    of_step: Any = dict(rows=slots, steps=1, itemsize=2, float32_head=True)
    mean = round(assumed_lengths(parts.config).mean_context)
    for context in sorted({mean, *CONTEXTS}):
        bytes_of = [
            work.decode(parts.arch, **of_step, context=each).bytes
            for each in (0, context)
        ]
        nothing, bound = (each / chips / chip.hbm_bandwidth * 1e6 for each in bytes_of)
        expected = seconds + latency + bound - nothing
        yield (
            f"| {topology_name} | {chips} | {slots} | {linears:,.0f} | {peak:.0%} | "
            f"{seconds - linears:,.0f} | {collectives} | {context:,} | {bound:,.0f} | "
            f"{expected:,.0f} | {bound / expected:.0%} |"
        )


def taken(
    program: Program, name: str, times: int = 1
) -> Iterator[tuple[Instruction, int]]:
    """Yield each instruction and how often it runs in a call.

    Only the first branch of a condition counts: in the sampler it is the one without
    filters; the train step has no conditions.
    """
    for each in program.computations[name].values():
        yield each, times
        branches = list(program.calls(each, name))
        if each.op == "conditional":
            branches = branches[:1]
        for called, turns in branches:
            yield from taken(program, called, times * turns)


def cycles(program: Program) -> Mapping[str, float]:
    """Return the estimated cycles of a call: of all, linears, head; and the FLOPs."""
    found: dict[str, float] = collections.defaultdict(float)
    for each, times in taken(program, program.entry):
        for op in COLLECTIVES:
            if each.op in (op, f"{op}-start"):
                found["collectives"] += times
                found["asynchronous"] += times * each.op.endswith("start")
        estimated = _estimate(each.rest)
        if not estimated or each.op in ("while", "conditional", "call"):
            continue
        found["all"] += times * estimated
        products = list(_products(program, each))
        if not products:
            continue
        # A float32 product is several passes; the head's alone are.
        exact = any(above_default(one.rest) for one, _ in products)
        found["head" if exact else "linears"] += times * estimated
        found["head flops" if exact else "flops"] += times * sum(
            product_flops(one, inside) for one, inside in products
        )
    return found


def _estimate(rest: str) -> float:
    _, found, after = rest.partition('"estimated_cycles":"')
    return float(after.partition('"')[0]) if found else 0.0


def _products(
    program: Program, instruction: Instruction
) -> Iterator[tuple[Instruction, dict[str, Instruction]]]:
    """Yield the products in a fusion, each with the instructions of its computation."""
    for called in instruction.called:
        inside = program.computations.get(called, {})
        for one in inside.values():
            if one.op in PRODUCTS:
                yield one, inside
            yield from _products(program, one)


if __name__ == "__main__":
    main()
