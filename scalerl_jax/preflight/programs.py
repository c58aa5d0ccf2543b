"""Build a config's learner and sampler for the devices of a topology."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from scalerl_jax.cluster.placement import Seats
from scalerl_jax.config import Config
from scalerl_jax.data.detokenizer import Detokenizer
from scalerl_jax.formats.reading import is_hub_id
from scalerl_jax.learner.step import TrainState
from scalerl_jax.machines.partition import Box
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.attention import SegmentAttention
from scalerl_jax.model.attention_kernels import CudnnAttention, kernel_of, why_not
from scalerl_jax.parallel.mesh import split_devices
from scalerl_jax.planning.memory import cudnn_bytes
from scalerl_jax.preflight.fitting import Fitted, fit_topology
from scalerl_jax.preflight.topologies import Topology, part_of
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.kernels import choose_attention, why_not_pallas
from scalerl_jax.sampler.kernels_gpu import CudnnPagedAttention, why_not_triton
from scalerl_jax.sampler.paged import PagedAttention
from scalerl_jax.types import PyTree
from scalerl_jax.wiring.devices import is_shared, make_meshes
from scalerl_jax.wiring.learning import (
    abstract_state,
    make_architecture,
    make_forward,
    make_train_step,
)
from scalerl_jax.wiring.sampling import make_engine, make_tokenizer
from scalerl_jax.wiring.teacher import abstract_teacher


@dataclasses.dataclass(frozen=True)
class Placement:
    """Devices of the learner and of the sampler."""

    learner: Topology
    sampler: Topology
    devices: list[Any]  # the learner's first, the sampler's last
    unused: int

    @property
    def separate(self) -> bool:
        """True if learner and sampler are compiled for different topologies."""
        return self.learner != self.sampler


def seat(seats: Seats, topology: Topology) -> Placement:
    """Return the placement of a run on several hosts; each box counts as a slice."""
    box, slices = seats.learner[0].box, len(seats.learner)
    learner = _of_box(topology, box, slices=slices)
    sampler = _of_box(topology, seats.replicas[0].box)
    busy = seats.learner_chips
    busy += sum(part.box.num_chips for part in seats.replicas)
    devices = learner.devices()
    whole = len(devices) // slices  # a box that is a part of its host is less
    firsts = range(0, len(devices), whole)
    return Placement(
        learner,
        sampler,
        [
            *(one for first in firsts for one in devices[first:][: box.num_chips]),
            *sampler.devices()[: seats.replicas[0].box.num_chips],
        ],
        topology.num_devices - busy,
    )


def _of_box(topology: Topology, box: Box, *, slices: int = 1) -> Topology:
    """Return boxes of chips as a topology; part of a host becomes its whole host."""
    part = box.num_chips < 4 and not topology.chip.whole_slices
    shape = (2, 2, 1) if part else box.shape[: topology.chip.sides]
    return dataclasses.replace(topology, shape=shape, slices=slices)


def place(config: Config, topology: Topology) -> Placement:
    """Choose the devices of a config with fixed mesh axes, for a run in one process.

    On 3D tori learner and sampler are parts of one slice.  On 2D tori, where the
    compiler takes whole slices, each is a rectangle of its own.

    Raises:
        ValueError: the topology has too few devices, or no such rectangle.
    """
    mesh, generators = config.mesh, config.generators
    learner = mesh.num_devices
    split_devices(
        range(topology.num_devices),
        learner_count=learner,
        replicas=generators.count,
        each=generators.devices,
        shared=is_shared(config),
    )
    own = 0 if is_shared(config) else generators.count * generators.devices
    if mesh.slices != topology.slices:
        raise ValueError(
            f"mesh.slices = {mesh.slices} must be the {topology.slices} slices of "
            f"--topology={topology.name}, where a run in one process cannot be placed; "
            f"set it so, and mesh.data to a multiple"
        )
    unused = topology.num_devices - learner - own
    if topology.chip.whole_slices:
        of_learner = part_of(topology, learner, setting="the mesh's product")
        of_sampler, devices = of_learner, of_learner.devices()
        if own:
            one = dataclasses.replace(topology, slices=1)
            of_sampler = part_of(one, generators.devices, setting="generators.devices")
            devices += of_sampler.devices()
        return Placement(of_learner, of_sampler, devices, unused)
    devices = topology.devices()
    each, share = len(devices) // topology.slices, learner // topology.slices
    # The first of each slice learn; `sorted` keeps the order of both halves.
    order = sorted(range(len(devices)), key=lambda at: at % each >= share)
    return Placement(topology, topology, [devices[at] for at in order], unused)


class AssumedTokenizer:
    """Substitute for a tokenizer that is not available: programs need only lengths."""

    characters_per_token = 4  # of English; Llama 3's tokenizer has 4.4
    eos_ids = (2,)
    shown = Detokenizer(later=(), first=())  # of no token: the table has its size

    def encode(self, text: str) -> list[int]:
        """Return ids of about the number of tokens in the text."""
        return list(range(3, 3 + max(1, len(text) // self.characters_per_token)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """A config's learner and sampler on a topology, ready to be compiled."""

    config: Config
    arch: Architecture
    fitted: Fitted
    placement: Placement
    learner_mesh: Mesh
    sampler_mesh: Mesh
    state: TrainState  # shapes
    attention: SegmentAttention
    engine: Engine
    teacher: PyTree | None  # shapes of its params; None: the learner holds none
    notes: list[str]

    @property
    def reserved(self) -> dict[str, int]:
        """Bytes that attention reserves in a microbatch, which no compiler counts."""
        if not isinstance(self.attention, CudnnAttention):
            return {}
        return {"cuDNN's workspace": cudnn_bytes(self.config, self.arch)}


def make_parts(config: Config, topology: Topology) -> tuple[Parts, Any]:
    """Return the parts and the train step.

    If a run can be started on several hosts, each role gets the run's box of chips.

    Raises:
        ValueError: a setting cannot be used on this topology.
    """
    notes: list[str] = []
    arch = make_architecture(config)
    fitted = fit_topology(config, arch, topology)
    config = fitted.config
    if fitted.seats is not None:
        placement = seat(fitted.seats, topology)
    else:
        placement = place(config, topology)
    # Every replica runs the programs of the first.
    first = dataclasses.replace(config.generators, count=1)
    learner_mesh, (sampler_mesh,) = make_meshes(
        dataclasses.replace(config, generators=first), arch, placement.devices
    )
    forward = make_forward(config, arch, learner_mesh)
    step = make_train_step(config, forward, learner_mesh)
    given = config.data.tokenizer or config.model.checkpoint
    tokenizer: Any = AssumedTokenizer()
    if given and (Path(given).exists() or is_hub_id(given)):
        tokenizer = make_tokenizer(config, arch)
    elif config.interruption.enabled:
        notes.append(
            f"no tokenizer available: the interruption phrase is assumed to have "
            f"{len(tokenizer.encode(config.interruption.phrase))} tokens"
        )
    assert forward.attention is not None, "make_forward chooses one"
    parts = Parts(
        config=config,
        arch=arch,
        fitted=fitted,
        placement=placement,
        learner_mesh=learner_mesh,
        sampler_mesh=sampler_mesh,
        state=abstract_state(config, arch, learner_mesh),
        attention=forward.attention,
        engine=make_engine(config, arch, tokenizer, sampler_mesh),
        teacher=abstract_teacher(config, learner_mesh),
        notes=notes,
    )
    return parts, step


def attention_names(parts: Parts) -> dict[str, str]:
    """Return the attention of each role, with the reason if it is not the kernel."""
    config, engine, chip = parts.config, parts.engine, parts.placement.learner.chip
    learner = type(parts.attention).__name__.removesuffix("Attention").lower()
    device, kernel = parts.placement.devices[0], kernel_of(chip.platform)
    refused = why_not(
        kernel,
        arch=parts.arch,
        platform=device.platform,
        shards=config.mesh.context,
        dtype=jnp.dtype(config.model.compute_dtype),
        row_tokens=config.batch.row_tokens,
        capability=chip.capability,
    )
    if learner == kernel or config.model.attention != "auto":
        refused = ""
    why, sampler = "", config.sampler.attention
    if sampler == "auto" and chip.platform == "gpu":
        chosen = type(choose_attention(engine.settings, engine.mesh))
        others = {PagedAttention: "paged", CudnnPagedAttention: "cudnn"}
        sampler = others.get(chosen, "pallas")
        why = why_not_triton(engine.settings, tensor=engine.mesh.shape["tensor"]) or ""
    elif sampler == "auto":
        why = why_not_pallas(engine.settings, tensor=engine.mesh.shape["tensor"])
        sampler = "paged" if why else "pallas"
    names = {"learner": (learner, refused), "sampler": (sampler, why)}
    return {
        side: f"{name} (the kernel does not support {reason})" if reason else name
        for side, (name, reason) in names.items()
    }
