"""Params from the learner to the sampler: cast, laid out anew, always a copy."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.shardings import sampler_shardings
from scalerl_jax.model.transformer import unstack_layers
from scalerl_jax.types import PyTree


def make_publish(
    arch: Architecture, *, dtype: jnp.dtype, learner_mesh: Mesh, sampler_mesh: Mesh
) -> Callable[[PyTree], PyTree]:
    """A function from the learner's params to a copy on the sampler's devices.

    What it returns is laid out by `architecture.layered_table`.  The train step donates
    its state: what is published must own its memory.  The cast
    and the gathering of fsdp shards run in one program on the learner's mesh, so that
    the transfer moves shards as they are.  Where the meshes differ in `tensor`, the
    shards differ too and the transfer goes through the host: correct, but slow.
    """

    def cast(params: PyTree) -> PyTree:
        return jax.tree.map(
            lambda leaf: jnp.array(leaf, dtype=dtype, copy=True),
            unstack_layers(params, arch),
        )

    copy = jax.jit(cast, out_shardings=sampler_shardings(arch, learner_mesh))
    destination = sampler_shardings(arch, sampler_mesh)

    def publish(params: PyTree) -> PyTree:
        return jax.block_until_ready(jax.device_put(copy(params), destination))

    return publish
