"""Device meshes: their axes, and the split of devices into learner and generators.

A mesh always has the axes of `AXES`; unused axes have size 1, so that callers need not
check which exist.  `model.architecture` defines how parameters are sharded.
"""

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from scalerl_jax.parallel.compiling import tpu_options

Device = Any  # a jax.Device, a name that type checkers take for a variable
# Replicas of the state, on two axes, the first of which has a TPU slice each; its
# shards, on two axes, the second of which also divides experts; shards of a row's
# tokens; shards of heads.
AXES = ("slices", "data", "fsdp", "expert", "context", "tensor")
SLICES = "slices"
SHARDS = ("fsdp", "expert")
ROWS = (SLICES, "data", *SHARDS)  # axes that divide the rows of a batch


def make_mesh(
    devices: Sequence[Device],
    *,
    slices: int = 1,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
) -> Mesh:
    """Return a mesh of all `devices`, in their order, with the axes of `AXES`.

    The state has `data` replicas, on the mesh's axes "slices" and "data" together, and
    `fsdp` shards, on the axes "fsdp" and "expert" together; experts are divided among
    `expert` of them.  `tensor` varies fastest, since neighbours in the list exchange
    the most.  With several `slices` the devices of each come together.  The axes are
    Auto: `jax.make_mesh` makes Explicit axes, with which `jax.jit` refuses programs
    that leave the layout of intermediate values to the compiler.

    Raises:
        ValueError: the number of devices is not data * fsdp * context * tensor, a
            number of parts does not divide its whole, or the devices are not `slices`
            slices of equal size.
    """
    if data % slices:
        raise ValueError(
            f"mesh.slices = {slices} does not divide mesh.data = {data}, the replicas "
            f"of the state, of which each slice has equally many; make that a "
            f"multiple, or 0"
        )
    if fsdp % expert:
        raise ValueError(
            f"mesh.expert = {expert} does not divide mesh.fsdp = {fsdp}, the shards "
            f"among which experts are divided; set it to a divisor"
        )
    wanted = data * fsdp * context * tensor
    if len(devices) != wanted:
        raise ValueError(
            f"mesh.data * mesh.fsdp * mesh.context * mesh.tensor = {data} * {fsdp} * "
            f"{context} * {tensor} = {wanted} devices, but the learner has "
            f"{len(devices)}; change one of them (most often mesh.fsdp), "
            f"or provide {wanted}"
        )
    return Mesh(
        np.asarray(_by_slice(devices, slices), dtype=object).reshape(
            slices, data // slices, fsdp // expert, expert, context, tensor
        ),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
    )


def _by_slice(devices: Sequence[Device], slices: int) -> list[Device]:
    """Return the devices with those of each slice together, in their order.

    Only TPUs have slices (`slice_index` of a CPU tells its machine); other devices, in
    the order of their processes, count as `slices` equal ones.

    Raises:
        ValueError: they are of another number of slices, or not equally many of each.
    """
    if slices == 1 or getattr(devices[0], "platform", "") != "tpu":
        return list(devices)

    def number(device: Device) -> int:
        return getattr(device, "slice_index", 0)  # devices of a single slice lack it

    ordered = sorted(devices, key=number)
    counts = collections.Counter(map(number, ordered))
    if len(counts) != slices or len(set(counts.values())) > 1:
        raise ValueError(
            f"mesh.slices = {slices}, but the learner's {len(devices)} devices are "
            f"{', '.join(map(str, counts.values()))} of {len(counts)} slices; set "
            f"mesh.slices to their number, with equally many devices of each"
        )
    return ordered


def num_shards(mesh: Mesh) -> int:
    """Return the number of shards of the train state on a mesh."""
    return math.prod(mesh.shape[axis] for axis in SHARDS)


def compiler_options(
    role: Literal["learner", "sampler"], mesh: Mesh
) -> dict[str, bool | int]:
    """Return the compiler options of a program on a mesh; {} unless it has TPUs."""
    if mesh.devices.flat[0].platform != "tpu":
        return {}

    return tpu_options(role, mesh)


def over_mesh(
    mesh: Mesh | None, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return `function` applied to each device's shards; without a mesh, unchanged.

    The function does its own collectives; `out_specs` is not checked.  Within
    `in_each_slice` it is applied to those of the slice.
    """
    if mesh is None:
        return function
    here, manual = _here(mesh)
    specs = jax.tree.map(
        lambda spec: _without(spec, manual),
        (in_specs, out_specs),
        is_leaf=lambda spec: isinstance(spec, PartitionSpec),
    )
    return jax.shard_map(
        function,
        mesh=here,
        in_specs=specs[0],
        out_specs=specs[1],
        axis_names=set(here.axis_names) - manual,
        check_vma=False,
    )


def in_each_slice(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (whole, parts, rows) that each slice applies to its own.

    `whole` are arrays of which a slice has all, `parts` have a first axis with an entry
    for each slice, and `rows` are divided among slices along their first axis.  The
    results have a first axis like `parts`: nothing is summed between slices, not even
    the gradients of `whole` that the function takes.
    """

    def of_slice(whole: Any, parts: Any, rows: Any) -> Any:
        found = function(whole, jax.tree.map(lambda leaf: leaf[0], parts), rows)
        return jax.tree.map(lambda leaf: leaf[None], found)

    first = PartitionSpec(SLICES)
    return jax.shard_map(
        of_slice,
        mesh=mesh,
        in_specs=(PartitionSpec(), first, first),
        out_specs=first,
        axis_names={SLICES},
        check_vma=False,
    )


def constrain(x: Array, mesh: Mesh, spec: PartitionSpec) -> Array:
    """Constrain the sharding of an intermediate value, also within `in_each_slice`."""
    here, manual = _here(mesh)
    sharding = NamedSharding(here, _without(spec, manual))
    return jax.lax.with_sharding_constraint(x, sharding)


def _here(mesh: Mesh) -> tuple[Any, set[str]]:
    """Return the mesh of the program being traced, and axes that it no longer has."""
    here = jax.sharding.get_abstract_mesh()
    manual = set(here.manual_axes)
    return (here, manual) if manual else (mesh, manual)


def _without(spec: PartitionSpec, axes: set[str]) -> PartitionSpec:
    """Return a spec without some mesh axes."""

    def kept(entry: Any) -> Any:
        if isinstance(entry, tuple):
            return tuple(name for name in entry if name not in axes)
        return None if entry in axes else entry

    return PartitionSpec(*map(kept, spec)) if axes else spec


def split_devices(
    devices: Sequence[Device],
    *,
    learner_count: int,
    replicas: int,
    each: int,
    shared: bool,
) -> tuple[list[Device], list[list[Device]]]:
    """Return the learner's devices, and those of every generator replica.

    The learner gets the first devices and the replicas the last; `shared` replicas use
    parts of the learner's devices, assigned in turn.  Devices in between stay idle.

    Raises:
        ValueError: the devices do not suffice.
    """
    own = 0 if shared else replicas * each
    if learner_count + own > len(devices):
        raise ValueError(
            f"mesh.data * mesh.fsdp * mesh.context * mesh.tensor = {learner_count} "
            f"learner devices and generators.count = {replicas} x generators.devices "
            f"= {each} need {learner_count + own}, but there are {len(devices)}; lower "
            f"one of the axes, or set generators.placement = 'shared'"
        )
    learner = list(devices[:learner_count])
    rest = list(devices[len(devices) - own :]) if own else learner
    if each > len(rest):
        raise ValueError(
            f"generators.devices = {each} is more than the {len(rest)} devices of the "
            f"learner, which generators.placement = 'shared' gives them; lower it"
        )
    places = [number % (len(rest) // each) * each for number in range(replicas)]
    return learner, [rest[first : first + each] for first in places]


def largest_divisor(length: int, most: int) -> int:
    """Return the largest divisor of `length` that is at most `most`."""
    return next(n for n in range(min(length, most), 0, -1) if length % n == 0)
