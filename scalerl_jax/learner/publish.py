"""Params from the learner to the sampler: cast, laid out anew, moved, and checked.

`make_publish` is for a sampler in the learner's own process.  For those of others each
process of the learner sends its own shards of a snapshot (`make_snapshot`,
`weights.sending`); a replica takes what its devices hold (`weights.receiving`).

Programs on the learner's mesh, one for all layers, cast the params, cut them into the
sampler's own shards and sum them up; the shards then go from device to device.  The
sampler sums them up again before it uses them, so that a version is wholly there or not
there.
"""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from scalerl_jax.model.architecture import (
    Architecture,
    layered_shardings,
    layered_table,
    sampler_shardings,
)
from scalerl_jax.model.lora import Factors, join
from scalerl_jax.model.transformer import make_lay_out, make_lay_out_parts
from scalerl_jax.parallel.mesh import AXES, SLICES
from scalerl_jax.parallel.xla import is_full
from scalerl_jax.types import PyTree
from scalerl_jax.weights.publication import Published, leaf_checksums, parts_of

_log = logging.getLogger(__name__)
# Axes that carry the cut over heads, in this order: the learner's own comes first.
_CUT_FIRST = ("tensor", "expert", "fsdp", "context", "data", SLICES)


def make_snapshot(
    arch: Architecture,
    *,
    dtype: DTypeLike,
    learner_mesh: Mesh,
    weights_dtype: str = "model",
    trained: PyTree | None = None,
) -> Callable[[PyTree], PyTree]:
    """Make a function from the learner's params to a cast copy, an array per layer.

    The copy is cut like the params, so that nothing moves between devices, and owns its
    memory, as the train step donates its state.  Of several processes all must call the
    function; each then publishes the `own_shards` of the copy.  With `trained`, a tree
    with shardings, the function is of trees like it, a part of the params, which stay
    stacks; factors stay float32.
    """
    if trained is not None:
        return jax.jit(
            lambda params: jax.tree.map(
                lambda leaf, kind: jnp.array(leaf, dtype=kind, copy=True),
                params,
                part_dtypes(trained, dtype),
            ),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, trained),
        )
    return make_lay_out(
        arch,
        dtype=dtype,
        weights_dtype=weights_dtype,
        shardings=layered_shardings(arch, learner_mesh, weights_dtype),
    )


def part_dtypes(trained: PyTree, dtype: DTypeLike) -> PyTree:
    """Return the dtype in which each leaf of a part of the params is published."""

    def kinds(part: Any) -> Any:
        kind = jnp.dtype("float32" if isinstance(part, Factors) else dtype)
        return jax.tree.map(lambda _: kind, part)

    return jax.tree.map(kinds, trained, is_leaf=lambda x: isinstance(x, Factors))


def make_completion(
    arch: Architecture,
    frozen: PyTree,
    *,
    dtype: DTypeLike,
    sampler_mesh: Mesh,
    weights_dtype: str = "model",
) -> Callable[[PyTree], PyTree]:
    """Make a function from a published part to all params, as the sampler takes them.

    `frozen` stays on the devices of `sampler_mesh`, beside what is made.
    """
    lay_out = make_lay_out(
        arch,
        dtype=dtype,
        weights_dtype=weights_dtype,
        shardings=sampler_shardings(arch, sampler_mesh, weights_dtype),
    )
    return lambda trained: jax.block_until_ready(lay_out(join(trained, frozen)))


Publish = Callable[[PyTree, Int[Array, ""]], Published]


def make_publish(
    arch: Architecture,
    *,
    dtype: DTypeLike,
    learner_mesh: Mesh,
    sampler_mesh: Mesh,
    weights_dtype: str = "model",
) -> Publish:
    """Make a function from the learner's params and version to the sampler's copy.

    The copy owns its memory, as the train step donates its state.  Nothing goes through
    the host: `jax.device_put` would silently send an array that way if a shard of its
    destination were not a shard of its source.

    Raises (the function that is returned):
        RuntimeError: the transfer failed; the sampler has what it had.
    """
    destination = sampler_shardings(arch, sampler_mesh, weights_dtype)
    stage = _make_stage(arch, dtype, learner_mesh, destination, weights_dtype)

    def publish(params: PyTree, policy_version: Int[Array, ""]) -> Published:
        try:
            staged = stage(params, policy_version)
            with (
                jax.transfer_guard_device_to_host("disallow_explicit"),
                jax.transfer_guard_host_to_device("disallow_explicit"),
            ):
                sent = jax.block_until_ready(_send(staged, destination))
        except jax.errors.JaxRuntimeError as error:
            if is_full(error):  # the caller has the settings and explains it
                raise
            raise RuntimeError(
                f"the params of version {int(policy_version)} could not be sent to the "
                f"sampler, which continues with its current params: {error}"
            ) from error
        return sent

    return publish


def _make_stage(
    arch: Architecture,
    dtype: DTypeLike,
    learner_mesh: Mesh,
    destination: PyTree,
    weights_dtype: str,
) -> Callable[[PyTree, Array], Published]:
    """Make the function on the learner's mesh; it gives a list of arrays for each leaf.

    With N devices of the learner and T shards of the sampler, an array can be cut
    gcd(N, T) ways on the learner.  Where that is less than T, each of T / gcd arrays
    holds every T / gcd-th shard.
    """
    devices, replica = _devices(learner_mesh, destination)
    if devices % replica:
        _log.info(
            "publishing holds 1/%d of the params on every learner device, not 1/%d: "
            "generators.devices = %d does not divide the %d devices of the learner",
            *(math.gcd(devices, replica), replica, replica, devices),
        )
    everywhere = NamedSharding(learner_mesh, PartitionSpec())
    shards = _staged_shardings(
        layered_table(arch, weights_dtype), learner_mesh, destination
    )
    first, layer, *_ = parts_of(shards)
    to_first, to_layer, *_ = parts_of(destination)

    def finish(
        to: PyTree, copies: PyTree, policy_version: Array
    ) -> tuple[PyTree, Array]:
        cut = jax.tree.map(lambda leaf, to: _split(leaf, _cut(to), devices), copies, to)
        return cut, leaf_checksums(copies, policy_version)

    stage_parts = make_lay_out_parts(
        arch,
        (functools.partial(finish, to_first), functools.partial(finish, to_layer)),
        dtype=dtype,
        weights_dtype=weights_dtype,
        shardings=((first, everywhere), (layer, everywhere)),
    )

    copy = jax.jit(
        lambda number: jnp.array(number, copy=True), out_shardings=everywhere
    )

    def stage(params: PyTree, policy_version: Array) -> Published:
        staged, sums = zip(*stage_parts(params, policy_version), strict=True)
        others, *layers = staged
        return Published(
            params=others | {"layers": tuple(layers)},
            policy_version=copy(policy_version),
            checksums=sums,
        )

    return stage


def _devices(learner_mesh: Mesh, destination: PyTree) -> tuple[int, int]:
    """Return the number of devices of the learner, and of the sampler."""
    return learner_mesh.devices.size, jax.tree.leaves(destination)[0].mesh.size


def _staged_shardings(table: PyTree, learner_mesh: Mesh, destination: PyTree) -> PyTree:
    """Return the shardings on the learner's mesh of the arrays of each leaf.

    Raises:
        ValueError: the shards of the sampler do not divide a leaf.
    """
    devices, replica = _devices(learner_mesh, destination)

    def shard(spec: Any, sharding: NamedSharding) -> list[NamedSharding]:
        cut = _cut(sharding)
        if cut.shards == 1:
            return [NamedSharding(learner_mesh, PartitionSpec())]
        if spec.shape[cut.dimension] % cut.shards:
            raise ValueError(
                f"generators.devices = {replica} does not divide "
                f"{spec.axes[cut.dimension]} = {spec.shape[cut.dimension]} of the "
                f"model; set it to a divisor"
            )
        mesh, axes = _cut_mesh(learner_mesh, math.gcd(devices, cut.shards))
        spec = PartitionSpec(*(None,) * cut.dimension, axes)
        return [NamedSharding(mesh, spec)] * cut.split(devices)

    return jax.tree.map(shard, table, destination)


def _cut_mesh(mesh: Mesh, cuts: int) -> tuple[Mesh, tuple[str, ...]]:
    """Return a mesh on which the sampler's shards can be cut, and the cutting axes.

    It has the devices of `mesh` in their order, and two axes for each of its own.  The
    first of the two cuts and the second holds copies, so that a learner whose heads are
    cut more finely gathers from neighbours only.  All cutting axes make `cuts` parts.
    """
    sizes = dict.fromkeys(_CUT_FIRST, 1)
    for axis in _CUT_FIRST:
        sizes[axis] = math.gcd(mesh.shape[axis], cuts // math.prod(sizes.values()))
    names, shape = [], []
    for axis in AXES:
        names += [f"{axis}_cut", f"{axis}_copies"]
        shape += [sizes[axis], mesh.shape[axis] // sizes[axis]]
    cut_mesh = Mesh(
        mesh.devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names)
    )
    return cut_mesh, tuple(f"{axis}_cut" for axis in _CUT_FIRST)


class _Cut(NamedTuple):
    """The cut of a leaf on the sampler: one dimension into shards."""

    dimension: int
    shards: int

    def split(self, devices: int) -> int:
        """Return the number of arrays that `devices` of a learner cut the leaf into."""
        return self.shards // math.gcd(devices, self.shards)


def _cut(sharding: NamedSharding) -> _Cut:
    for dimension, names in enumerate(sharding.spec):
        if names is not None:
            axes = names if isinstance(names, tuple) else (names,)
            shards = math.prod(sharding.mesh.shape[axis] for axis in axes)
            return _Cut(dimension, shards)
    return _Cut(0, 1)


def _split(leaf: Array, cut: _Cut, devices: int) -> list[Array]:
    """Return arrays; array j holds the shards j, j + split, j + 2 * split, ..."""
    split = cut.split(devices)
    if split == 1:
        return [leaf]
    dimension, cuts = cut.dimension, cut.shards // split
    before, after = leaf.shape[:dimension], leaf.shape[dimension + 1 :]
    apart = leaf.reshape(*before, cuts, split, -1, *after)
    return [
        jax.lax.index_in_dim(apart, number, dimension + 1, keepdims=False).reshape(
            *before, -1, *after
        )
        for number in range(split)
    ]


def _send(staged: Published, destination: PyTree) -> Published:
    """Copy the staged arrays to the sampler's devices, shard by shard."""

    def targets(to: NamedSharding, arrays: list[Array]) -> list[NamedSharding]:
        split, cut = len(arrays), _cut(to)
        if split == 1:
            return [to]
        # The axes that cut a leaf vary fastest: devices by copies and shards, of which
        # each array has its own.
        devices = np.asarray(to.mesh.devices).reshape(-1, cut.shards)
        spec = PartitionSpec(*(None,) * cut.dimension, "shards")
        meshes = (
            Mesh(devices[:, number::split], ("copies", "shards"))
            for number in range(split)
        )
        return [NamedSharding(mesh, spec) for mesh in meshes]

    def join(to: NamedSharding, arrays: list[Array]) -> Array:
        if len(arrays) == 1:
            return arrays[0]
        shape = list(arrays[0].shape)
        shape[_cut(to).dimension] *= len(arrays)
        shards = {
            shard.device: shard.data
            for array in arrays
            for shard in array.addressable_shards
        }
        order = to.addressable_devices_indices_map(tuple(shape))
        return jax.make_array_from_single_device_arrays(
            tuple(shape), to, [shards[device] for device in order]
        )

    mesh = jax.tree.leaves(destination)[0].mesh
    everywhere: Any = NamedSharding(mesh, PartitionSpec())
    sent = jax.device_put(
        staged,
        Published(
            params=jax.tree.map(targets, destination, staged.params),
            policy_version=everywhere,
            checksums=everywhere,
        ),
    )
    return sent.replace(params=jax.tree.map(join, destination, sent.params))
