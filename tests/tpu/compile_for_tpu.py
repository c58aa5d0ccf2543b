"""Compiles for TPUs that are not there, and prints what came out, as JSON.

    compile_for_tpu.py engine CHIP TENSOR LAYERS   an 8B sampler's two programs
    compile_for_tpu.py int8 CHIP TENSOR LAYERS     the same with an int8 cache
    compile_for_tpu.py rings CHIP TENSOR LAYERS    every second layer sees a window
    compile_for_tpu.py int8_rings CHIP TENSOR LAYERS
    compile_for_tpu.py paged CHIP TENSOR LAYERS    in plain XLA on the pages
    compile_for_tpu.py paged64 CHIP TENSOR LAYERS  the same with short heads and windows
    compile_for_tpu.py kernel CHIP                 the kernel at its limits
    compile_for_tpu.py splash CHIP                 the learner's attention, both passes
    compile_for_tpu.py experts CHIP PARTS TOP_K    a layer's gradient, experts divided
    compile_for_tpu.py preflight TOPOLOGY LAYERS   configs/8b.py, cut down

A program of its own: the compiler is set up by environment variables that no process
with other work should have.
"""

import dataclasses
import functools
import json
import pathlib
import re
import runpy
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from scalerl_jax import config as config_lib
from scalerl_jax.model.architecture import Experts, param_shardings, parameter_table
from scalerl_jax.model.attention_kernels import SplashAttention
from scalerl_jax.model.ffn_moe import expert_feed_forward
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.parallel.mesh import ROWS, make_mesh
from scalerl_jax.preflight.check import check
from scalerl_jax.preflight.report import to_json
from scalerl_jax.preflight.topologies import parse_topology
from scalerl_jax.sampler.attention import Chunk, Rows
from scalerl_jax.sampler.decoding import EngineSettings
from scalerl_jax.sampler.engine import MAX_SEQUENCES, Engine
from scalerl_jax.sampler.kernels import choose_attention, why_not_pallas
from scalerl_jax.sampler.lowering import lower_generate, lower_prefill, page_bytes

TOPOLOGIES = {
    "v4": dict(topology_name="v4:2x2x1"),
    "v5e": dict(topology_name="v5e:2x4", chips_per_host_bounds=(2, 4, 1)),
    "v5p": dict(topology_name="v5:2x2x1"),
    "v6e": dict(topology_name="v6e:2x4", chips_per_host_bounds=(2, 4, 1)),
}
SETTINGS = EngineSettings(
    arch=ARCHITECTURES["llama3.1-8b"],
    slots=64,
    max_prompt_tokens=2048,
    max_completion_tokens=14336,
    tokens_per_call=16,
    dtype=jnp.bfloat16,
    eos_ids=(1,),
    cache_tokens=64 * 4096,
    prefill_tokens=512,
)
INT8 = dict(kv_dtype="int8", page_size=128)
WINDOWS = (1024, 0)  # tokens that a layer sees; 0: all


def mesh_of(chip, tensor):
    """The first devices of the chip's topology."""
    topology = topologies.get_topology_desc(
        platform="tpu", num_slices=1, **TOPOLOGIES[chip]
    )
    return make_mesh(topology.devices[:tensor], tensor=tensor)


def compile_engine(chip, tensor, layers, *, windows=(), head_dim=128, **changes):
    """Kernels, float32 head matmuls and memory of each program."""
    repeated = windows * (layers // max(len(windows), 1))
    arch = dataclasses.replace(
        SETTINGS.arch, num_layers=layers, windows=repeated, head_dim=head_dim
    )
    settings = dataclasses.replace(SETTINGS, arch=arch, **changes)
    engine = Engine(settings, mesh=mesh_of(chip, tensor))
    logits = rf"f32\[{settings.slots},{arch.vocab_size // tensor}\]"
    head = re.compile(
        rf"= {logits}\S* (?:dot|convolution)\(.*operand_precision={{highest,highest}}"
    )
    report = {}
    for name, lower in (("generate", lower_generate), ("prefill", lower_prefill)):
        compiled = lower(engine).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        report[name] = {
            "kernels": text.count('custom_call_target="tpu_custom_call"'),
            "float32_heads": len(head.findall(text)),
            "temporary_bytes": memory.temp_size_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
            "in_place_bytes": memory.alias_size_in_bytes,
        }
    report["ring_pages"] = [settings.ring_pages, settings.pages_in_rings]
    return report | {"pages_bytes": settings.num_pages * page_bytes(engine) // tensor}


def compile_kernel(chip):
    """How many shapes compiled: all that `why_not_pallas` lets through must."""
    mesh, count = mesh_of(chip, 1), 0
    cases = [  # queries per key, kv heads, dtype, page size, slots
        (1, 1, "bfloat16", 32, 64),
        (4, 1, "bfloat16", 32, 486),
        (7, 4, "bfloat16", 32, 64),
        (4, 8, "bfloat16", 4, 32),
        (4, 8, "bfloat16", 128, 1920),
        (4, 8, "bfloat16", 512, 64),
        (8, 16, "bfloat16", 32, 64),
        (1, 4, "float32", 32, 64),
        (4, 8, "float32", 32, 64),
        (2, 12, "float32", 32, 64),
        # With a cache in int8.
        (1, 1, "bfloat16", 128, 63, "int8"),
        (7, 3, "bfloat16", 256, 64, "int8"),
        (4, 8, "bfloat16", 128, 1920, "int8"),
        (1, 32, "bfloat16", 128, 64, "int8"),
        (8, 4, "float32", 128, 64, "int8"),
    ]
    for group, kv, dtype, page_size, slots, *quantized in cases:
        arch = dataclasses.replace(SETTINGS.arch, num_heads=group * kv, num_kv_heads=kv)
        settings = dataclasses.replace(
            SETTINGS,
            arch=arch,
            dtype=dtype,
            page_size=page_size,
            slots=slots,
            kv_dtype=(*quantized, "model")[0],
            attention="pallas",
        )
        refused = why_not_pallas(settings, tensor=1)
        assert refused is None, refused
        _compile_both(choose_attention(settings, mesh), settings)
        count += 1
    return {"compiled": count}


def compile_experts(chip, parts, top_k):
    """Collectives of the output and the gradient of sixteen experts, by name."""
    arch = dataclasses.replace(
        ARCHITECTURES["qwen3-30b-a3b"],
        num_layers=1,
        hidden_size=1024,
        experts=Experts(count=16, top_k=top_k, gate="normalized"),
    )
    topology = topologies.get_topology_desc(
        platform="tpu", num_slices=1, **TOPOLOGIES[chip]
    )
    mesh = make_mesh(topology.devices, fsdp=len(topology.devices), expert=parts)
    cuts = param_shardings(arch, mesh)["layers"]
    layer = {
        name: jax.ShapeDtypeStruct(
            spec.shape[1:],
            jnp.float32,
            sharding=jax.NamedSharding(mesh, jax.P(*cuts[name].spec[1:])),
        )
        for name, spec in parameter_table(arch)["layers"].items()
    }
    rows = jax.NamedSharding(mesh, jax.P(ROWS, "context", None))
    x = jax.ShapeDtypeStruct((mesh.size, 1024, 1024), jnp.bfloat16, sharding=rows)

    def loss(layer, x):
        output, _ = expert_feed_forward(layer, arch, x, mesh=mesh)
        return (output.astype(jnp.float32) ** 2).sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(layer, x).compile().as_text()
    names = ("ragged-all-to-all", "reduce-scatter")
    return {name: len(re.findall(rf"\s{name}(?:-start)?\(", text)) for name in names}


def preflight(topology, layers):
    """What the command answers for configs/8b.py with so many layers."""
    name = "llama3.1-8b"
    ARCHITECTURES[name] = dataclasses.replace(ARCHITECTURES[name], num_layers=layers)
    file = pathlib.Path(__file__).parents[2] / "configs" / "8b.py"
    config = runpy.run_path(str(file))["get_config"]()
    config.generators.devices = 4
    config.batch.short_rows = False  # three more programs, each as slow to compile
    result = check(config_lib.resolve(config), parse_topology(topology))
    return to_json(result, config_file=str(file))


def _compile_both(attention, settings):
    arch, width = settings.arch, settings.pages_per_slot

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def tokens(count, heads):
        return jax.ShapeDtypeStruct((count, heads, arch.head_dim), settings.dtype)

    def new(count):
        heads = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
        return [tokens(count, each) for each in heads]

    pages = jax.eval_shape(
        lambda: attention.init_pages(
            2048,
            settings.page_size,
            heads=arch.num_kv_heads,
            dim=128,
            dtype=settings.cache_dtype,
        )
    )
    rows, size = settings.slots, settings.prefill_tokens

    def decode(pages, q, k, v, table, starts, active):
        return attention.decode(
            pages,
            q,
            k,
            v,
            rows=Rows(table=table, starts=starts),
            step=jnp.int32(0),
            positions=starts,
            active=active,
        )

    active = jax.ShapeDtypeStruct((rows,), bool)
    jax.jit(decode).lower(
        pages, *new(rows), ints(rows, width), ints(rows), active
    ).compile()
    chunk = Chunk(
        tokens=ints(size),
        positions=ints(size),
        segments=ints(size),
        table=ints(MAX_SEQUENCES, width),
        query_starts=ints(MAX_SEQUENCES + 1),
        lengths=ints(MAX_SEQUENCES),
        num_sequences=ints(1),
    )
    jax.jit(attention.chunk).lower(pages, *new(size), chunk).compile()


def compile_splash(chip):
    """Temporary bytes of both passes, by the shape of queries, keys and their dtype."""
    report = {}
    for shape, kv_heads, dtype in (
        ((1, 16384, 32, 128), 8, "bfloat16"),
        ((1, 32768, 16, 256), 8, "bfloat16"),
        ((2, 16384, 8, 128), 8, "float32"),
        ((2, 1152, 8, 128), 1, "bfloat16"),  # blocks of 384
    ):
        mesh = mesh_of(chip, 1)
        attention = SplashAttention(mesh)

        def run(q, k, v, segment_ids, cotangent, attention=attention):
            found, back = jax.vjp(lambda *x: attention(*x, segment_ids), q, k, v)
            return found, back(cotangent)

        q = jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec())
        )
        kv = q.update(shape=(*shape[:2], kv_heads, shape[3]))
        ids = q.update(shape=shape[:2], dtype=jnp.int32)
        memory = jax.jit(run).lower(q, kv, kv, ids, q).compile().memory_analysis()
        report[f"{shape} {kv_heads} {dtype}"] = memory.temp_size_in_bytes
    return report


if __name__ == "__main__":
    what, chip, *numbers = sys.argv[1:]
    work = {
        "engine": compile_engine,
        "int8": functools.partial(compile_engine, **INT8),
        "int8 weights": functools.partial(compile_engine, weights_dtype="int8"),
        "rings": functools.partial(compile_engine, windows=WINDOWS),
        "int8_rings": functools.partial(compile_engine, windows=WINDOWS, **INT8),
        "paged": functools.partial(compile_engine, attention="paged"),
        "paged64": functools.partial(
            compile_engine, attention="paged", head_dim=64, windows=WINDOWS
        ),
        "splash": compile_splash,
        "experts": compile_experts,
        "kernel": compile_kernel,
        "preflight": preflight,
    }[what]
    sys.stdout.write(json.dumps(work(chip, *map(int, numbers))) + "\n")
