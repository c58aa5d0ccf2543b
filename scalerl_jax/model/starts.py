"""Random starts: the parameters of a policy that no checkpoint gives."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from scalerl_jax.model.architecture import Architecture, ParamSpec, parameter_table
from scalerl_jax.types import PyTree

_INIT_STD = 0.02


def init_params(arch: Architecture, key: Array, *, dtype: DTypeLike) -> PyTree:
    """Return random weights: normal with std 0.02, norms at 1, biases at 0."""
    leaves, treedef = jax.tree.flatten(parameter_table(arch))

    def start(spec: ParamSpec, key: Array) -> Array:
        if spec.init == "ones":
            return jnp.ones(spec.shape, dtype)
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, dtype)
        return (jax.random.normal(key, spec.shape) * _INIT_STD).astype(dtype)

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(treedef, [*map(start, leaves, keys)])
