"""A config's programs, made for the devices of a topology and compiled."""

import dataclasses
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalerl_jax.build.learning import (
    abstract_state,
    fit_devices,
    make_architecture,
    make_forward,
    make_meshes,
    make_train_step,
)
from scalerl_jax.build.sampling import make_engine, make_tokenizer
from scalerl_jax.config import Config
from scalerl_jax.data.spelling import Spelling
from scalerl_jax.learner.step import TrainState
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.attention import SegmentAttention
from scalerl_jax.model.attention_kernels import WHY_NOT
from scalerl_jax.parallel.mesh import AXES, split_devices
from scalerl_jax.preflight import hlo
from scalerl_jax.preflight.chips import Chip, Topology, part_of
from scalerl_jax.preflight.memory import ProgramMemory, program_memory
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.kernels import why_not_pallas
from scalerl_jax.utils.hub import is_hub_id
from scalerl_jax.utils.xla import is_full


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Who gets which devices."""

    learner: Topology
    sampler: Topology
    devices: list[Any]  # the learner's first, the sampler's last
    unused: int

    @property
    def separate(self) -> bool:
        """Whether the programs were compiled for slices of their own."""
        return self.learner != self.sampler


def place(config: Config, topology: Topology) -> Placement:
    """The devices of a config whose axes are numbers.

    On 3D tori both are parts of one slice.  On 2D tori, where the compiler takes whole
    slices, each is a rectangle of its own.

    Raises:
        ValueError: the topology has too few, or none of that form.
    """
    mesh = config.mesh
    learner = math.prod(getattr(mesh, axis) for axis in AXES)
    split_devices(
        range(topology.num_devices),
        learner_count=learner,
        sampler_count=mesh.sampler_devices,
    )
    if mesh.data % topology.slices:
        raise ValueError(
            f"mesh.data = {mesh.data} must be a multiple of the {topology.slices} "
            f"slices of --topology={topology.name}: only replicas of the state may be "
            f"far apart; set mesh.data = {topology.slices}"
        )
    unused = topology.num_devices - learner - mesh.sampler_devices
    one = dataclasses.replace(topology, slices=1)
    if topology.chip.whole_slices:
        of_learner = part_of(topology, learner, setting="the mesh's product")
        of_sampler, devices = of_learner, of_learner.devices()
        if mesh.sampler_devices:
            of_sampler = part_of(
                one, mesh.sampler_devices, setting="mesh.sampler_devices"
            )
            devices += of_sampler.devices()
        return Placement(
            learner=of_learner, sampler=of_sampler, devices=devices, unused=unused
        )
    devices = topology.devices()
    each, share = len(devices) // topology.slices, learner // topology.slices
    first = [at for at in range(len(devices)) if at % each < share]
    rest = [at for at in range(len(devices)) if at % each >= share]
    return Placement(
        learner=topology,
        sampler=topology,
        devices=[devices[at] for at in first + rest],
        unused=unused,
    )


class AssumedTokenizer:
    """Stands in where no tokenizer is at hand: programs depend on lengths alone."""

    characters_per_token = 4  # of English; Llama 3's has 4.4
    eos_ids = (2,)
    shown = Spelling(later=(), first=())  # of no token: the table has its size

    def encode(self, text: str) -> list[int]:
        """As many ids as the text may have."""
        return list(range(3, 3 + max(1, len(text) // self.characters_per_token)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What is compiled: a config's learner and sampler on a topology."""

    config: Config
    arch: Architecture
    placement: Placement
    learner_mesh: Mesh
    sampler_mesh: Mesh
    state: TrainState  # shapes
    attention: SegmentAttention
    engine: Engine
    notes: list[str]


def make_parts(config: Config, topology: Topology) -> tuple[Parts, Any]:
    """The parts, and the train step.

    Raises:
        ValueError: a setting cannot be used on this topology.
    """
    notes: list[str] = []
    arch = make_architecture(config)
    config = fit_devices(config, arch, topology.num_devices)
    placement = place(config, topology)
    learner_mesh, sampler_mesh = make_meshes(config, arch, placement.devices)
    forward = make_forward(config, arch, learner_mesh)
    step = make_train_step(config, forward, learner_mesh)
    given = config.data.tokenizer or config.model.checkpoint
    tokenizer: Any = AssumedTokenizer()
    if given and (Path(given).exists() or is_hub_id(given)):
        tokenizer = make_tokenizer(config, arch)
    elif config.interruption.enabled:
        notes.append(
            f"no tokenizer at hand: the interruption phrase is taken to have "
            f"{len(tokenizer.encode(config.interruption.phrase))} tokens"
        )
    assert forward.attention is not None, "make_forward chooses one"
    parts = Parts(
        config=config,
        arch=arch,
        placement=placement,
        learner_mesh=learner_mesh,
        sampler_mesh=sampler_mesh,
        state=abstract_state(config, arch, learner_mesh),
        attention=forward.attention,
        engine=make_engine(config, arch, tokenizer, sampler_mesh),
        notes=notes,
    )
    return parts, step


def attention_names(parts: Parts) -> dict[str, str]:
    """Which attention each side got, and why not the kernel."""
    config, mesh = parts.config, parts.learner_mesh
    learner = type(parts.attention).__name__.removesuffix("Attention").lower()
    refused = WHY_NOT["splash"](
        parts.arch,
        mesh,
        jnp.dtype(config.model.compute_dtype),
        config.batch.row_tokens,
    )
    if learner != "splash" and config.model.attention == "auto" and refused:
        learner += f" (the TPU kernel does not take {refused})"
    engine = parts.engine
    why = why_not_pallas(engine.settings, tensor=engine.mesh.shape["tensor"])
    sampler = config.sampler.attention
    if sampler == "auto":
        sampler = "paged" if why else "pallas"
    if config.sampler.attention == "auto" and why:
        sampler += f" (the TPU kernel does not take {why})"
    return {"learner": learner, "sampler": sampler}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One compiled program, or why there is none."""

    memory: ProgramMemory | None
    program: hlo.Program | None
    too_large: str = ""  # the compiler's words


def compile_program(name: str, lower: Callable[[], Any]) -> Compiled:
    """Compile what `lower` returns; a program that is too large is an answer too."""
    sys.stderr.write(f"compiling {name}\n")
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        words = " ".join(str(error).split())[:400]
        if not is_full(error):
            raise ValueError(
                f"the compiler refuses {name} on these devices: {words}; try other "
                f"sizes of mesh.* or another --topology"
            ) from error
        return Compiled(memory=None, program=None, too_large=words)
    return Compiled(
        memory=program_memory(compiled), program=hlo.parse(compiled.as_text())
    )


def memory_limit(device: Any, chip: Chip) -> int:
    """Bytes that programs may have on a device, as the compiler says it.

    It is asked for a program that nothing holds, and names the limit in its refusal.
    """
    mesh = Mesh([device], ("alone",))
    sharding = NamedSharding(mesh, PartitionSpec())
    huge = jax.ShapeDtypeStruct((2**20, 2**18), jnp.float32, sharding=sharding)
    try:
        jax.jit(lambda x: x + 1).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"exceeds available HBM \(([\d.]+)([MGT])\)", str(error))
        if found:
            unit = {"M": 2**20, "G": 2**30, "T": 2**40}[found[2]]
            return int(float(found[1]) * unit)
    return chip.hbm_bytes
