"""The check of a config on a topology: compile, add up, compare with the limit."""

import dataclasses
import math
from typing import Any

import jax

from scalerl_jax.config import Config
from scalerl_jax.parallel.mesh import largest_divisor
from scalerl_jax.preflight import flops
from scalerl_jax.preflight.chips import Topology
from scalerl_jax.preflight.collectives import (
    HeadMatmuls,
    Traffic,
    head_matmuls,
    traffic,
)
from scalerl_jax.preflight.memory import (
    device_bytes,
    learner_parts,
)
from scalerl_jax.preflight.programs import (
    Compiled,
    Parts,
    attention_names,
    compile_program,
    make_parts,
    memory_limit,
)
from scalerl_jax.preflight.roofline import Roofline, roofline
from scalerl_jax.sampler.lowering import (
    decode_state,
    lower_generate,
    lower_prefill,
    sampler_params,
)
from scalerl_jax.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """One program: its need and its cost."""

    parts: dict[str, int]  # bytes of a device while it runs, by what they are for
    peak_bytes: int
    too_large: str
    traffic: dict[str, Traffic]
    work: flops.Work
    roofline: Roofline
    head: HeadMatmuls | None
    calls: int = 1  # in an optimizer step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What is to be reported."""

    parts: Parts
    topology: Topology
    limit: int
    programs: dict[str, Checked]
    attention: dict[str, str]
    microbatches: int

    @property
    def fits(self) -> bool:
        """Whether every program has room beside what else lives on its devices."""
        return all(
            not each.too_large and each.peak_bytes <= self.limit
            for each in self.programs.values()
        )


def check(config: Config, topology: Topology) -> Result:
    """Compile everything that a run of `config` needs on the topology.

    Raises:
        ValueError: a setting cannot be used on this topology.
    """
    parts, step = make_parts(config, topology)
    limit = memory_limit(parts.placement.devices[0], topology.chip)
    microbatches = count_microbatches(parts.config)
    lowered = step.lower()
    compiled = {
        name: compile_program(name, lambda one=one: one)
        for name, one in lowered.items()
    }
    compiled["prefill"] = compile_program(
        "prefill", lambda: lower_prefill(parts.engine)
    )
    compiled["decode"] = compile_program("decode", lambda: lower_generate(parts.engine))
    return Result(
        parts=parts,
        topology=topology,
        limit=limit,
        programs={
            name: _checked(name, each, parts, topology, microbatches)
            for name, each in compiled.items()
        }
        | {"publish": _publish(parts, topology)},
        attention=attention_names(parts),
        microbatches=microbatches,
    )


def count_microbatches(config: Config) -> int:
    """Of a step in which every rollout has the greatest length."""
    batch, sampler = config.batch, config.sampler
    # The last token of a rollout predicts nothing.
    longest = sampler.max_prompt_tokens + sampler.max_completion_tokens - 1
    in_a_row = max(1, batch.row_tokens // longest) if batch.packing else 1
    rows = -(-batch.num_prompts * batch.group_size // in_a_row)
    return -(-rows // batch.rows_per_microbatch)


def sampler_parts(parts: Parts) -> dict[str, int]:
    """Bytes of a device of the sampler, whatever it runs."""
    params = device_bytes(sampler_params(parts.engine))
    cache = device_bytes(decode_state(parts.engine))
    return {
        "sampler's params": params,
        "params of the next version": params,
        "KV cache": cache,
        "KV cache of an evaluation": cache,
    }


def _shared(parts: Parts) -> bool:
    return not parts.config.mesh.sampler_devices


def _resident(parts: Parts, name: str) -> dict[str, int]:
    """What is on the devices of a program beside its arguments."""
    state, sampler = parts.state, sampler_parts(parts)
    params = device_bytes(state.params)
    if name in ("prefill", "decode"):
        everything = {"learner's state": device_bytes(state)} if _shared(parts) else {}
        return everything
    others = sampler if _shared(parts) else {}
    if name == "accumulate":
        return {"optimizer": device_bytes(state) - params} | others
    if name == "start":
        return {"params": params, "optimizer": device_bytes(state) - params} | others
    if state.critic is None:
        return others
    critic = device_bytes(state.critic)
    if name == "update":
        gradients = _gradient_bytes(state.critic.params)
        return {"critic": critic, "critic's gradients": gradients} | others
    own = {"critic_update": critic, "critic_start": 0}
    read = own.get(name, device_bytes(state.critic.params))
    return {
        "policy's state": device_bytes(state) - critic,
        "policy's gradients": _gradient_bytes(state.params),
        "rest of the critic": critic - read,
    } | others


def _gradient_bytes(params: PyTree) -> int:
    return device_bytes(
        jax.tree.map(lambda leaf: leaf.update(dtype=jax.numpy.float32), params)
    )


def _checked(
    name: str, compiled: Compiled, parts: Parts, topology: Topology, microbatches: int
) -> Checked:
    memory, config = compiled.memory, parts.config
    temporaries = memory.temporaries if memory else 0
    code = memory.code if memory else 0
    if name in ("prefill", "decode"):
        engine = parts.engine
        programs = len(engine.chunk_sizes) + len(engine.row_counts) * len(
            engine.table_widths
        )
        own = sampler_parts(parts) | {
            "temporaries": temporaries,
            "code of all programs": code * programs,
        }
    elif name == "accumulate":
        own = learner_parts(config, parts.arch, parts.state, temporaries) | {
            "code": code
        }
    else:
        kept = memory.arguments + memory.outputs - memory.aliased if memory else 0
        own = {"arguments and results": kept, "temporaries": temporaries, "code": code}
    everything = _resident(parts, name) | own
    devices = _devices(parts, name)
    found = traffic(compiled.program, num_devices=devices) if compiled.program else {}
    work = _work(name, parts)
    return Checked(
        parts=everything,
        peak_bytes=sum(everything.values()),
        too_large=compiled.too_large,
        traffic=found,
        work=work,
        roofline=roofline(
            topology.chip,
            work,
            found,
            devices=devices,
            float32_head=config.model.float32_head,
        ),
        head=_head(name, compiled, parts),
        calls=microbatches if name.endswith("accumulate") else 1,
    )


def _publish(parts: Parts, topology: Topology) -> Checked:
    """Between two steps: the state, and a copy of the params in the sampler's cut."""
    engine = parts.engine
    shards, devices = engine.mesh.size, parts.learner_mesh.size
    copy = device_bytes(sampler_params(engine)) * shards // math.gcd(shards, devices)
    own = {"learner's state": device_bytes(parts.state), "copy to publish": copy}
    own |= sampler_parts(parts) if _shared(parts) else {}
    return Checked(
        parts=own,
        peak_bytes=sum(own.values()),
        too_large="",
        traffic={},
        work=flops.Work(),
        roofline=roofline(
            topology.chip, flops.Work(), {}, devices=devices, float32_head=False
        ),
        head=None,
    )


def _devices(parts: Parts, name: str) -> int:
    if name in ("prefill", "decode"):
        return parts.sampler_mesh.size
    return parts.learner_mesh.size


def _work(name: str, parts: Parts) -> flops.Work:
    """Of one call, on all of its devices; decoding is of full sequences.

    A critic is taken for a policy: its head is next to nothing, and not the output's.
    """
    name = name.removeprefix("critic_")
    config, arch, engine = parts.config, parts.arch, parts.engine
    param_bytes = 4 if config.model.param_dtype == "float32" else 2
    itemsize = 4 if config.model.sampler_dtype == "float32" else 2
    if name == "accumulate":
        return flops.microbatch(
            arch,
            rows=config.batch.rows_per_microbatch,
            row_tokens=config.batch.row_tokens,
            devices=parts.learner_mesh.size,
            tensor=config.mesh.tensor,
            remat=config.model.remat,
            attention=type(parts.attention).__name__.removesuffix("Attention").lower(),
            float32_head=config.model.float32_head,
            param_bytes=param_bytes,
        )
    if name == "update":
        return flops.optimizer_update(arch, param_bytes=param_bytes)
    if name == "start":
        return flops.Work(bytes=4.0 * arch.num_params)
    if name == "prefill":
        return flops.prefill(
            arch,
            tokens=engine.chunk_sizes[-1],
            context=engine.settings.max_prompt_tokens,
            itemsize=itemsize,
        )
    return flops.decode(
        arch,
        rows=engine.row_counts[-1],
        context=decode_context(parts),
        steps=engine.settings.tokens_per_call,
        itemsize=itemsize,
        float32_head=config.model.float32_head,
    )


def decode_context(parts: Parts) -> float:
    """Tokens that each slot holds when the cache is full, at most a whole sequence."""
    settings = parts.engine.settings
    held = settings.num_pages * settings.page_size / settings.slots
    return min(float(settings.max_tokens), held)


def _head(name: str, compiled: Compiled, parts: Parts) -> HeadMatmuls | None:
    """The head's matmuls, if it is a program with tokens."""
    if compiled.program is None or name.startswith("critic_"):
        return None
    if name in ("start", "update"):
        return None
    config, arch = parts.config, parts.arch
    if name == "accumulate":
        local = arch.vocab_size // config.mesh.tensor
        sides = {local, largest_divisor(local, config.model.head_chunk_vocab)}
    else:
        sides = {arch.vocab_size // parts.engine.mesh.shape["tensor"]}
    return head_matmuls(compiled.program, vocabulary=sides)


def head_is_float32(name: str, head: HeadMatmuls | None) -> bool:
    """Whether a program's head was found, and all of it is float32.

    `prefill` has none: it draws no token.  The last prompt token is decoded.
    """
    if head is None:
        return False
    return head.float32 and (head.highest > 0 or name == "prefill")


def estimate_largest(result: Result) -> dict[str, Any]:
    """Rows and tokens that would fit, with temporaries in proportion to tokens."""
    parts, checked = result.parts, result.programs["accumulate"]
    if checked.too_large:
        return {}
    fixed = sum(
        size
        for name, size in checked.parts.items()
        if name not in ("saved activations", "other temporaries")
    )
    config = parts.config
    growing = checked.peak_bytes - fixed
    times = max(0.0, (result.limit - fixed) / growing) if growing else 1.0
    batch, mesh = config.batch, config.mesh
    shards = mesh.data * mesh.fsdp
    rows = int(times * batch.rows_per_microbatch / shards) * shards
    unit = 128 * mesh.context
    return {
        "rows_per_microbatch": rows,
        "row_tokens": int(times * batch.row_tokens / unit) * unit,
    }


def search_rows(config: Config, topology: Topology, result: Result) -> int:
    """The most rows of a microbatch whose train step fits, found by compiling.

    It begins at the estimate and goes down; 0 if no shard has room for one row.
    """
    mesh = result.parts.config.mesh
    shards = mesh.data * mesh.fsdp
    estimate = estimate_largest(result)
    rows = estimate["rows_per_microbatch"] if estimate else 0
    rows = max(rows, result.parts.config.batch.rows_per_microbatch)
    while rows:
        batch = dataclasses.replace(config.batch, rows_per_microbatch=rows)
        parts, step = make_parts(dataclasses.replace(config, batch=batch), topology)
        lowered = step.lower()["accumulate"]
        compiled = compile_program(f"{rows} rows", lambda one=lowered: one)
        found = _checked("accumulate", compiled, parts, topology, 1)
        if not compiled.too_large and found.peak_bytes <= result.limit:
            break
        rows -= shards
    return rows
