"""Frozen parameters: without update, weight decay, moments and gradient.

Their gradient is zeros: it counts for no norm, and the compiler drops what would
compute it.
"""

import dataclasses
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from scalerl_jax.learner.step import Accumulate, Accumulated
from scalerl_jax.types import PackedBatch, PyTree


def freeze(
    optimizer: optax.GradientTransformation, patterns: Sequence[str]
) -> optax.GradientTransformation:
    """Return the optimizer restricted to parameters that no pattern freezes."""

    def frozen(params: PyTree) -> PyTree:
        return frozen_params(params, patterns)

    def trained(params: PyTree) -> PyTree:
        return jax.tree.map(lambda held: not held, frozen(params))

    return optax.chain(
        optax.masked(optimizer, trained), optax.masked(optax.set_to_zero(), frozen)
    )


def without_gradient(accumulate: Accumulate, patterns: Sequence[str]) -> Accumulate:
    """Return `accumulate` with zeros for the gradient of frozen parameters."""

    def accumulate_others(
        params: PyTree, so_far: Accumulated | None, batch: PackedBatch
    ) -> Accumulated:
        sums = accumulate(params, so_far, batch)
        grads = jax.tree.map(
            lambda held, leaf: jnp.zeros_like(leaf) if held else leaf,
            frozen_params(params, patterns),
            sums.grads,
        )
        return dataclasses.replace(sums, grads=grads)

    return accumulate_others


def frozen_params(params: PyTree, patterns: Sequence[str]) -> PyTree:
    """Return a tree that is True at the leaves whose whole name a pattern matches.

    Names are paths in the tree: "embedding", "layers/query".  Layers are stacked, so
    that a name stands for a parameter of all layers.

    Raises:
        ValueError: a pattern is no regular expression or matches nothing, or all of
            them together leave nothing to train.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths
    ]
    frozen: set[str] = set()
    for pattern in patterns:
        try:
            matches = {name for name in names if re.fullmatch(pattern, name)}
        except re.error as error:
            raise ValueError(
                f"model.frozen holds {pattern!r}, which is no regular expression: "
                f"{error}"
            ) from error
        if not matches:
            raise ValueError(
                f"model.frozen holds {pattern!r}, which matches the whole name of no "
                f"parameter; there are {names}"
            )
        frozen |= matches
    if len(frozen) == len(names):
        raise ValueError(
            f"model.frozen = {tuple(patterns)} matches every parameter, and leaves "
            f"nothing to train: {names}"
        )
    return jax.tree.unflatten(treedef, [name in frozen for name in names])
