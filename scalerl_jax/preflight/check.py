"""Check of a config on a topology: compile, add up memory, compare with the limit.

Bytes are those of the fullest device, from `preflight.memory`.
"""

import dataclasses
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.model.layers import ROUTER
from scalerl_jax.parallel.mesh import SLICES, largest_divisor
from scalerl_jax.planning import work
from scalerl_jax.planning.lengths import Lengths
from scalerl_jax.planning.memory import (
    has_head_once,
    head_bytes,
    read_bytes,
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
from scalerl_jax.preflight.memory import SAMPLING, program_memory, publish_memory
from scalerl_jax.preflight.products import Excess, excesses, narrow_loops
from scalerl_jax.preflight.programs import Parts, attention_names, make_parts
from scalerl_jax.preflight.topologies import Roofline, Topology, link_share, roofline
from scalerl_jax.preflight.whole_step import WholeStep, make_whole_step
from scalerl_jax.sampler.lowering import lower_generate, lower_prefill


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
    # Per optimizer step if every rollout has the greatest length: of a program of short
    # rows 0, which takes the place of the last call of that of whole rows.
    calls: int = 1

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
        programs=programs | {"publish": Checked(parts=publish_memory(parts))},
        attention=attention_names(parts),
        microbatches=count_microbatches(parts.config),
        whole=make_whole_step(parts.fitted, parts.arch, topology, lengths),
    )


def count_microbatches(config: Config) -> int:
    """Return the microbatches of a step if every rollout has the greatest length."""
    batch, sampler = config.batch, config.sampler
    # The last token of a rollout predicts nothing.
    longest = sampler.max_prompt_tokens + sampler.max_completion_tokens - 1
    in_a_row = max(1, min(batch.row_tokens // longest, batch.packed_segments))
    rows = -(-batch.num_prompts * batch.group_size // in_a_row)
    return -(-rows // batch.rows_per_microbatch)


def _with_rows_of(name: str, parts: Parts) -> tuple[str, Parts]:
    """Return a program's name without the tokens of short rows, and parts with these.

    Others are returned unchanged.
    """
    whole, _, tokens = name.rpartition("_")
    if not tokens.isdecimal():
        return name, parts
    batch = dataclasses.replace(parts.config.batch, row_tokens=int(tokens))
    config = dataclasses.replace(parts.config, batch=batch)
    return whole, dataclasses.replace(parts, config=config)


def _calls(name: str, parts: Parts) -> int:
    """Return the calls of a program in a step of rollouts of the greatest length."""
    if _with_rows_of(name, parts)[0] != name:
        return 0
    return count_microbatches(parts.config) if name.endswith("accumulate") else 1


def _checked(
    name: str, compiled: Compiled, parts: Parts, topology: Topology
) -> Checked:
    calls = _calls(name, parts)
    name, parts = _with_rows_of(name, parts)
    mesh, box = parts.learner_mesh, parts.placement.learner
    if name in SAMPLING:
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
        calls=calls,
    )


# -- cost -----------------------------------------------------------------------------


def _work(name: str, parts: Parts) -> Work:
    """Return the work of one call on all its devices; decoding has full sequences.

    A critic counts as a policy, although its head is far smaller than an output head.
    """
    config, arch, engine = parts.config, parts.arch, parts.engine
    param_bytes = value_bytes(config.model.param_dtype)
    match name.removeprefix("critic_"):
        case "accumulate":
            return work.microbatch(
                arch,
                rows=config.batch.rows_per_microbatch,
                row_tokens=config.batch.row_tokens,
                devices=parts.learner_mesh.size,
                tensor=config.mesh.tensor,
                remat=config.model.remat,
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
    if compiled.program is None or name not in ("accumulate", *SAMPLING):
        return None
    local = parts.arch.vocab_size // parts.config.mesh.tensor
    sides = {local, largest_divisor(local, parts.config.model.head_chunk_vocab)}
    if name in SAMPLING:
        sides = {parts.arch.vocab_size // parts.engine.mesh.shape["tensor"]}
    return head_matmuls(compiled.program, vocabulary=sides)


def _router(compiled: Compiled, parts: Parts) -> HeadMatmuls | None:
    """Return the matmuls of the router of a mixture of experts, else None."""
    if compiled.program is None or parts.arch.experts is None:
        return None
    return scope_matmuls(compiled.program, ROUTER)


def head_is_float32(name: str, head: HeadMatmuls | None) -> bool:
    """Return True if the program's head was found and its logits are float32.

    `prefill` has no head: it samples no token.  The last prompt token is decoded.
    """
    if head is None or below_float32(name, head):
        return False
    return head.highest > 0 or name == "prefill"


def below_float32(name: str, head: HeadMatmuls) -> int:
    """Return the program's matmuls below float32; gradients may be of 16 bits.

    They are computed with a microbatch, of whole or of short rows.
    """
    return head.below_float32(gradients=name.startswith("accumulate"))


def router_is_float32(router: HeadMatmuls | None) -> bool | None:
    """Return True if the router was found and is all float32; None: no mixture."""
    if router is None:
        return None
    return router.highest > 0 and not router.below_float32()


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
