"""Check of a config on a topology: compile, add up memory, compare with the limit.

Sizes of params, state and caches are computed from shapes and shardings; the peak of a
program's temporaries comes from the compiler.  Bytes are those of the fullest device.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from scalerl_jax.config import Config
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.layers import ROUTER
from scalerl_jax.parallel.mesh import SLICES, largest_divisor
from scalerl_jax.planning import work
from scalerl_jax.planning.lengths import Lengths
from scalerl_jax.planning.memory import (
    has_head_once,
    head_bytes,
    logits_tile,
    publishes_part,
    read_bytes,
    sampler_versions,
    saved_activations,
    value_bytes,
)
from scalerl_jax.planning.work import Work
from scalerl_jax.preflight.collectives import Traffic, traffic
from scalerl_jax.preflight.hlo import (
    Compiled,
    HeadMatmuls,
    compile_program,
    head_matmuls,
    memory_limit,
    scope_matmuls,
)
from scalerl_jax.preflight.products import Excess, excesses, narrow_loops
from scalerl_jax.preflight.programs import Parts, attention_names, make_parts
from scalerl_jax.preflight.topologies import Roofline, Topology, link_share, roofline
from scalerl_jax.preflight.whole_step import WholeStep, make_whole_step
from scalerl_jax.sampler.lowering import (
    decode_state,
    lower_generate,
    lower_prefill,
    sampler_params,
)
from scalerl_jax.types import PyTree
from scalerl_jax.wiring.devices import is_shared, why_not_one_process
from scalerl_jax.wiring.learning import abstract_state

_SAMPLING = ("prefill", "decode")  # programs on the sampler's devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """One program's memory and cost."""

    parts: dict[str, int]  # bytes on a device while the program runs, by purpose
    too_large: str = ""  # the compiler's message; empty: it compiled
    traffic: dict[str, Traffic] = dataclasses.field(default_factory=dict)
    work: Work = Work()
    roofline: Roofline = Roofline()
    head: HeadMatmuls | None = None
    excesses: tuple[Excess, ...] = ()  # products compiled to more FLOPs than requested
    # Source lines (file:line) at which loops sum products in a narrow type.
    narrow: tuple[str, ...] = ()
    router: HeadMatmuls | None = None  # of a mixture of experts
    calls: int = 1  # per optimizer step

    @property
    def peak_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedConfig:
    """Result of `check`: all programs, the memory limit and the whole step."""

    parts: Parts
    topology: Topology
    limit: int
    programs: dict[str, Checked]
    attention: dict[str, str]
    microbatches: int
    whole: WholeStep

    @property
    def fits(self) -> bool:
        """True if every program fits beside the other data on its devices."""
        return all(
            not each.too_large and each.peak_bytes <= self.limit
            for each in self.programs.values()
        )


def check(
    config: Config, topology: Topology, lengths: Lengths | None = None
) -> CheckedConfig:
    """Compile everything that a run of `config` needs on the topology.

    The forecast of a whole step uses the rollouts' `lengths`; None: assumed lengths.

    Raises:
        ValueError: a setting cannot be used on this topology.
    """
    parts, step = make_parts(config, topology)
    chip = topology.chip
    limit = memory_limit(parts.placement.devices[0], chip)
    lowered = step.lower() | {
        "prefill": lower_prefill(parts.engine),
        "decode": lower_generate(parts.engine),
    }
    programs = {
        name: _checked(name, compile_program(name, each, chip), parts, topology)
        for name, each in lowered.items()
    }
    return CheckedConfig(
        parts=parts,
        topology=topology,
        limit=limit,
        programs=programs | {"publish": Checked(parts=_publish_memory(parts))},
        attention=attention_names(parts),
        microbatches=count_microbatches(parts.config),
        whole=make_whole_step(parts.fitted, parts.arch, topology, lengths),
    )


def count_microbatches(config: Config) -> int:
    """Return the microbatches of a step if every rollout has the greatest length."""
    batch, sampler = config.batch, config.sampler
    # The last token of a rollout predicts nothing.
    longest = sampler.max_prompt_tokens + sampler.max_completion_tokens - 1
    in_a_row = max(1, batch.row_tokens // longest) if batch.packing else 1
    rows = -(-batch.num_prompts * batch.group_size // in_a_row)
    return -(-rows // batch.rows_per_microbatch)


def _checked(
    name: str, compiled: Compiled, parts: Parts, topology: Topology
) -> Checked:
    mesh, box = parts.learner_mesh, parts.placement.learner
    if name in _SAMPLING:
        mesh, box = parts.sampler_mesh, parts.placement.sampler
    needed, found = _work(name, parts), {}
    wasteful: list[Excess] = []
    narrow: list[str] = []
    if compiled.program is not None and compiled.asked is not None:
        found = traffic(
            compiled.program,
            num_devices=mesh.size,
            num_slices=mesh.shape[SLICES],
        )
        wasteful = excesses(compiled.program, compiled.asked, num_devices=mesh.size)
        narrow = narrow_loops(compiled.program)
    return Checked(
        parts=program_memory(name, compiled, parts),
        too_large=compiled.too_large,
        traffic=found,
        work=needed,
        roofline=roofline(
            topology.chip, needed, found, devices=mesh.size, links=link_share(box)
        ),
        head=_head(name, compiled, parts),
        excesses=tuple(wasteful),
        narrow=tuple(narrow),
        router=_router(compiled, parts),
        calls=count_microbatches(parts.config) if name.endswith("accumulate") else 1,
    )


# -- memory ---------------------------------------------------------------------------


def device_bytes(tree: PyTree) -> int:
    """Return the bytes on one device of arrays, or of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _gradient_bytes(params: PyTree) -> int:
    return device_bytes(jax.tree.map(lambda x: x.update(dtype=jnp.float32), params))


def learner_parts(
    config: Config, arch: Architecture, state: PyTree, temporaries: int
) -> dict[str, int]:
    """Return the learner's bytes on a device, by part, during a microbatch."""
    params, gradients = device_bytes(state.params), _gradient_bytes(state.params)
    frozen = device_bytes(state.frozen)
    held = {"frozen params": frozen} if frozen else {}
    lasting = held | {
        "params": params,
        "optimizer": device_bytes(state) - params - frozen,
        "gradients so far": gradients,
    }
    passing = {
        "gradients of the microbatch": gradients,
        "saved activations": saved_activations(config, arch),
    } | logits_tile(config, arch)
    others = max(0, temporaries - sum(passing.values()))
    return lasting | passing | {"other temporaries": others}


def _sampler_parts(parts: Parts) -> dict[str, int]:
    """Return the sampler's bytes on a device, by part, apart from its temporaries."""
    params = device_bytes(sampler_params(parts.engine))
    cache = device_bytes(decode_state(parts.engine))
    versions = ["sampler's params"]
    if parts.config.generators.versions > 1:
        versions.append("params of the next version")
    if sampler_versions(parts.config) > len(versions):
        versions.append("params of an evaluation")
    held = dict.fromkeys(versions, params) | {"KV cache": cache}
    if base := _base_bytes(parts):
        held["frozen params"] = base
    return held


def _base_bytes(parts: Parts) -> int:
    """Return the bytes of frozen params beside the sampler's, in its own process."""
    config = parts.config
    own_process = parts.fitted.seats is not None or why_not_one_process(config)
    if not own_process or not publishes_part(config):
        return 0
    state = abstract_state(config, parts.arch, parts.sampler_mesh)
    return device_bytes(state.frozen)


def _beside_learner(parts: Parts) -> dict[str, int]:
    """Return the sampler's bytes on a device of the learner, by part."""
    return _sampler_parts(parts) if is_shared(parts.config) else {}


def program_memory(name: str, compiled: Compiled, parts: Parts) -> dict[str, int]:
    """Return the bytes on a device, by part, while a program runs.

    They include data that other programs keep on the device.
    """
    state, engine, code = parts.state, parts.engine, compiled.code
    whole, params = device_bytes(state), device_bytes(state.params)
    frozen = device_bytes(state.frozen)
    if name in _SAMPLING:
        shared = is_shared(parts.config)
        sizes = len(engine.chunk_sizes) + len(engine.decode_sizes)
        return ({"learner's state": whole} if shared else {}) | {
            **_sampler_parts(parts),
            "temporaries": compiled.temporaries,
            "code of all programs": code * sizes,
        }
    others = _beside_learner(parts)
    if name == "accumulate":
        own = learner_parts(parts.config, parts.arch, state, compiled.temporaries)
        return others | own | parts.reserved | {"code": code}
    if frozen:  # no other program takes them as an argument
        others |= {"frozen params": frozen}
    if name in ("start", "combine"):
        others |= {"params": params, "optimizer": whole - params - frozen}
    elif state.critic is not None:
        critic = device_bytes(state.critic)
        if name == "update":
            gradients = _gradient_bytes(state.critic.params)
            others |= {"critic": critic, "critic's gradients": gradients}
        else:
            own = {"critic_update": critic, "critic_start": 0, "critic_combine": 0}
            read = own.get(name, device_bytes(state.critic.params))
            others |= {
                "policy's state": whole - critic - frozen,
                "policy's gradients": _gradient_bytes(state.params),
                "rest of the critic": critic - read,
            }
    return others | {
        "arguments and results": compiled.kept,
        "temporaries": compiled.temporaries,
        "code": code,
    }


def _publish_memory(parts: Parts) -> dict[str, int]:
    """Return bytes while params are published: state, and a copy in sampler shards."""
    shards, devices = parts.engine.mesh.size, parts.learner_mesh.size
    copy = device_bytes(sampler_params(parts.engine)) * shards
    return {
        "learner's state": device_bytes(parts.state),
        "copy to publish": copy // math.gcd(shards, devices),
    } | _beside_learner(parts)


# -- cost -----------------------------------------------------------------------------


def _work(name: str, parts: Parts) -> Work:
    """Return the work of one call on all its devices; decoding has full sequences.

    A critic counts as a policy, although its head is far smaller than an output head.
    """
    config, arch, engine = parts.config, parts.arch, parts.engine
    param_bytes = value_bytes(config.model.param_dtype)
    match name.removeprefix("critic_"):
        case "accumulate":
            attention = type(parts.attention).__name__.removesuffix("Attention")
            return work.microbatch(
                arch,
                rows=config.batch.rows_per_microbatch,
                row_tokens=config.batch.row_tokens,
                devices=parts.learner_mesh.size,
                tensor=config.mesh.tensor,
                remat=config.model.remat,
                attention=attention.lower(),
                float32_head=config.model.float32_head,
                param_bytes=param_bytes,
                compute_bytes=value_bytes(config.model.compute_dtype),
                head_bytes=head_bytes(config),
                head_once=has_head_once(config, arch),
            )
        case "update":
            return work.optimizer_update(arch, param_bytes=param_bytes)
        case "start" | "combine":
            return Work(bytes=4.0 * arch.num_params)
        case "prefill":
            return work.prefill(
                arch,
                tokens=engine.chunk_sizes.largest[0],
                context=engine.settings.max_prompt_tokens,
                **read_bytes(config, arch),
            )
    return work.decode(
        arch,
        rows=engine.decode_sizes.largest[0],
        context=decode_context(parts),
        steps=engine.settings.tokens_per_call,
        **read_bytes(config, arch),
        float32_head=config.model.float32_head,
    )


def decode_context(parts: Parts) -> float:
    """Return the tokens per slot of a full cache, at most a whole sequence."""
    settings = parts.engine.settings
    held = settings.num_pages * settings.page_size / settings.slots
    return min(float(settings.max_tokens), held)


def _head(name: str, compiled: Compiled, parts: Parts) -> HeadMatmuls | None:
    """Return the head's matmuls of a program that may have a head, else None."""
    if compiled.program is None or name not in ("accumulate", *_SAMPLING):
        return None
    local = parts.arch.vocab_size // parts.config.mesh.tensor
    sides = {local, largest_divisor(local, parts.config.model.head_chunk_vocab)}
    if name in _SAMPLING:
        sides = {parts.arch.vocab_size // parts.engine.mesh.shape["tensor"]}
    return head_matmuls(compiled.program, vocabulary=sides)


def _router(compiled: Compiled, parts: Parts) -> HeadMatmuls | None:
    """Return the matmuls of the router of a mixture of experts, else None."""
    if compiled.program is None or parts.arch.experts is None:
        return None
    return scope_matmuls(compiled.program, ROUTER)


def head_is_float32(name: str, head: HeadMatmuls | None) -> bool:
    """Return True if the program's head was found and all its matmuls are float32.

    `prefill` has no head: it samples no token.  The last prompt token is decoded.
    """
    if head is None:
        return False
    return head.float32 and (head.highest > 0 or name == "prefill")


def router_is_float32(router: HeadMatmuls | None) -> bool | None:
    """Return True if the router was found and is all float32; None: no mixture."""
    return None if router is None else router.float32 and router.highest > 0


# -- what would fit -------------------------------------------------------------------


def estimate_largest(result: CheckedConfig) -> dict[str, Any]:
    """Estimate the rows and tokens that fit if temporaries grow with the tokens."""
    parts, checked = result.parts, result.programs["accumulate"]
    if checked.too_large:
        return {}
    names = ("saved activations", "other temporaries")
    growing = sum(checked.parts.get(name, 0) for name in names)
    left = result.limit - (checked.peak_bytes - growing)
    times = max(0.0, left / growing) if growing else 1.0
    batch, mesh = parts.config.batch, parts.config.mesh
    shards = mesh.data * mesh.fsdp
    unit = 128 * (4 if parts.config.short_rows else mesh.context)
    return {
        "rows_per_microbatch": int(times * batch.rows_per_microbatch / shards) * shards,
        "row_tokens": int(times * batch.row_tokens / unit) * unit,
    }
