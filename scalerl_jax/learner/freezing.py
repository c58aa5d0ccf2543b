"""Frozen parameters: which they are.

The train state has them in a tree of their own: they have no gradient, no moments, no
float32 copy, and are not in checkpoints.
"""

from collections.abc import Sequence

import jax

from scalerl_jax.model.lora import matching, param_names
from scalerl_jax.types import PyTree


def frozen_params(params: PyTree, patterns: Sequence[str]) -> PyTree:
    """Return a tree that is True at the leaves whose whole name a pattern matches.

    Names are paths in the tree: "embedding", "layers/query".  Layers are stacked, so
    that a name stands for a parameter of all layers.

    Raises:
        ValueError: a pattern is no regular expression or matches nothing, or all of
            them together leave nothing to train.
    """
    names = param_names(params)
    frozen = matching(names, patterns, setting="model.frozen")
    if len(frozen) == len(names):
        raise ValueError(
            f"model.frozen = {tuple(patterns)} matches every parameter, and leaves "
            f"nothing to train: {names}"
        )
    structure = jax.tree.structure(params)
    return jax.tree.unflatten(structure, [name in frozen for name in names])
