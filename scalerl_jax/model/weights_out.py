"""Params on their way between processes: a copy to publish, and a layout to receive.

Each process of the learner sends its own shards of the copy (`weights.sending`), and
a replica takes what its devices hold a part of (`weights.receiving`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from scalerl_jax.model.architecture import (
    Architecture,
    layered_shardings,
    layered_table,
    sampler_shardings,
)
from scalerl_jax.model.transformer import unstack_layers
from scalerl_jax.types import PyTree


def make_snapshot(
    arch: Architecture, *, dtype: DTypeLike, learner_mesh: Mesh
) -> Callable[[PyTree], PyTree]:
    """Make a function from the learner's params to a cast copy, an array per layer.

    The copy is cut like the params, so that nothing moves between devices, and owns its
    memory, as the train step donates its state.  Of several processes all must call the
    function; each then publishes the `own_shards` of the copy.
    """
    return jax.jit(
        lambda params: jax.tree.map(
            lambda leaf: jnp.array(leaf, dtype=dtype, copy=True),
            unstack_layers(params, arch),
        ),
        out_shardings=layered_shardings(arch, learner_mesh),
    )


def sampler_layout(arch: Architecture, *, dtype: DTypeLike, mesh: Mesh) -> PyTree:
    """Return shapes, dtypes and shardings of the sampler's params."""
    return jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(
            spec.shape, dtype, sharding=sharding
        ),
        layered_table(arch),
        sampler_shardings(arch, mesh),
    )
