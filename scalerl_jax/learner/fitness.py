"""Checks that a train state is finite: within a program, and on the host.

A number that is NaN or infinite never leaves a state again: each step spreads it.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from scalerl_jax.types import PyTree
from scalerl_jax.weights.shards import named_leaves

# Params are published in bfloat16, in which float32's largest numbers are infinite.
_LARGEST_PARAM = float(jnp.finfo(jnp.bfloat16).max)


def first_unfit(params: PyTree, opt_state: PyTree) -> Int[Array, ""]:
    """Return the place of the first leaf that is not finite, -1 if all are.

    Places count the leaves in the order of `names`.  A param must be finite in bfloat16
    too.  The
    program reads every leaf once and keeps no copy.
    """
    checks = [(jnp.abs(leaf) <= _LARGEST_PARAM).all() for leaf in _floating(params)]
    checks += [jnp.isfinite(leaf).all() for leaf in _floating(opt_state)]
    fit = jnp.stack(checks)
    return jnp.where(fit.all(), -1, jnp.argmin(fit)).astype(jnp.int32)


def names(params: PyTree, opt_state: PyTree) -> list[str]:
    """Return the names of the leaves that `first_unfit` counts, in its order."""
    return [
        *_named(params, prefix="params."),
        *_named(opt_state, prefix="opt_state."),
    ]


def unfit_leaf(tree: PyTree) -> str:
    """Return the name of the first array that is not finite; "" if all are.

    If a run has several processes, all must call this: each has a part of the arrays.
    """
    named = _named(tree)
    finite = jax.device_get(_finite(list(named.values())))
    bad = (name for name, fit in zip(named, finite, strict=True) if not fit)
    return next(bad, "")


@jax.jit
def _finite(leaves: Sequence[Array]) -> list[Array]:
    return [jnp.isfinite(leaf).all() for leaf in leaves]


def _floating(tree: PyTree) -> list[Array]:
    return list(_named(tree).values())


def _named(tree: PyTree, *, prefix: str = "") -> dict[str, Array]:
    """Return the floating-point leaves by name: others cannot be NaN or infinite."""
    return {
        f"{prefix}{name}": leaf
        for name, leaf in named_leaves(tree, separator=".").items()
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
