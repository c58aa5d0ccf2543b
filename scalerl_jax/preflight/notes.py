"""Sentences of a report: what to change if a config does not fit, and the method."""

from scalerl_jax.machines.chips import MEMORY_FRACTION, memory_fraction
from scalerl_jax.preflight.check import CheckedConfig
from scalerl_jax.preflight.figures import gib
from scalerl_jax.wiring.devices import is_shared

# Part of the memory -> settings that reduce it.
_SHARDS = "mesh.fsdp or more devices: more shards of the state"
ADVICE = {
    "params": _SHARDS,
    "optimizer": _SHARDS,
    "teacher": f"a smaller teacher, teacher.endpoint, or {_SHARDS}",
    "learner's state": _SHARDS,
    "gradients so far": _SHARDS,
    "gradients of the microbatch": _SHARDS,
    "saved activations": (
        "batch.rows_per_microbatch, model.remat = 'full', or mesh.context"
    ),
    "logits tile": "model.head_chunk_tokens or model.head_chunk_vocab",
    "slab of the head": "model.head_chunk_vocab",
    "cuDNN's workspace": "batch.row_segments, or model.attention = 'blockwise'",
    "other temporaries": (
        "batch.rows_per_microbatch, batch.row_tokens, mesh.context or mesh.tensor"
    ),
    "sampler's params": "generators.devices, or model.sampler_dtype = 'bfloat16'",
    "frozen params": "mesh.fsdp, or generators.devices: more shards of them",
    "params of the next version": "generators.versions = 1, or generators.devices",
    "KV cache": "sampler.cache_tokens, or generators.devices",
    "temporaries": "sampler.slots or sampler.prefill_tokens",
    "code of all programs": "sampler.slots: fewer sizes to compile for",
    "copy to publish": "generators.devices: more shards of the copy",
    "arguments and results": _SHARDS,
}


def advice(result: CheckedConfig) -> list[str]:
    """Return the advised changes, the largest part first; empty if everything fits."""
    said: list[str] = []
    for name, each in result.programs.items():
        if each.peak_bytes <= result.limit and not each.too_large:
            continue
        for part, size in sorted(each.parts.items(), key=lambda one: -one[1]):
            if part in ADVICE and size > result.limit / 100:
                line = f"{part} ({gib(size)} in {name}): {ADVICE[part]}"
                said.append(line)
        if each.too_large:
            said.append(f"{name} was not compiled: {each.too_large}")
            said.append(
                "its temporaries are therefore unknown: lower "
                "batch.rows_per_microbatch, batch.row_tokens or sampler.slots first"
            )
    return said


def notes(result: CheckedConfig) -> list[str]:
    """Return remarks on the method of the result, and on what it leaves out."""
    parts, placement = result.parts, result.parts.placement
    said = list(parts.notes)
    if placement.separate or placement.learner.shape != result.topology.shape:
        start = "; --ray=slice starts their processes" if parts.fitted.seats else ""
        said.append(
            f"the learner is compiled for {placement.learner.name}, the sampler for "
            f"{placement.sampler.name}: boxes of the slice{start}"
        )
    if placement.unused:
        said.append(_why_unused(result))
    if parts.config.mesh.slices > 1:
        said.append(
            "DCN is the network between slices: `combine` adds the slices' gradients "
            "through it, once a step; the compiler's own transfers there have no time"
        )
    said.append(
        "training and evaluations share the KV cache; the sampler holds "
        "generators.versions copies of the params, and one more with "
        "eval.concurrent; all are counted"
    )
    if result.topology.chip.platform == "gpu":
        said.append(
            f"JAX gives programs {memory_fraction():.0%} of a GPU's memory; "
            f"{MEMORY_FRACTION} sets the share"
        )
        said.append(
            "compiled without a GPU: matmuls are not autotuned, and cuDNN's workspace "
            "is an estimate"
        )
    said.append(
        "rooflines are lower bounds (all resources at their peak and overlapped); a "
        "float32 product at the highest precision takes 6 bfloat16 passes, 3 if one "
        "operand was bfloat16, and 1 if both were; of the head's gradients 3, 2 and 1"
    )
    return said


def _why_unused(result: CheckedConfig) -> str:
    """Return which settings leave devices unused, and which would use them."""
    parts, unused = result.parts, result.parts.placement.unused
    mesh, generators = parts.config.mesh, parts.config.generators
    product = f"mesh.data * fsdp * context * tensor = {mesh.num_devices}"
    taken = f"{product} gives the learner as many, which the generators share"
    rest = ""
    if not is_shared(parts.config):
        taken = (
            f"{product} and generators.count * devices = "
            f"{generators.count * generators.devices} take the others"
        )
        more = unused // parts.sampler_mesh.size
        rest = f"; they can hold {more} more generators of this size"
    return (
        f"{unused} of {result.topology.num_devices} devices stay unused, and are paid "
        f"for: {taken}{rest}; mesh.data, mesh.fsdp and generators.count = 0 leave the "
        f"split to the preflight and to runs"
    )
