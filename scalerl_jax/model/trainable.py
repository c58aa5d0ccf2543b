"""Params as two trees, the trained and the frozen ones.

Frozen params have no gradient, no moments and no float32 copy; checkpoints store only
their digest.
"""

import re
from collections.abc import Sequence

import jax

from scalerl_jax.types import PyTree
from scalerl_jax.weights.shards import named_leaves


def frozen_params(params: PyTree, patterns: Sequence[str]) -> PyTree:
    """Return a tree that is True at the leaves whose whole name a pattern matches.

    Names are paths in the tree: "embedding", "layers/query".  Layers are stacked, so a
    name stands for a parameter of all layers.

    Raises:
        ValueError: a pattern is no regular expression or matches no name, or the
            patterns together match every parameter.
    """
    names = list(named_leaves(params))
    frozen = matching(names, patterns, setting="model.frozen")
    if len(frozen) == len(names):
        raise ValueError(
            f"model.frozen = {tuple(patterns)} matches every parameter, and leaves "
            f"nothing to train: {names}"
        )
    structure = jax.tree.structure(params)
    return jax.tree.unflatten(structure, [name in frozen for name in names])


def matching(
    names: Sequence[str], patterns: Sequence[str], *, setting: str
) -> set[str]:
    """Return the names that any pattern matches as a whole.

    Raises:
        ValueError: a pattern is no regular expression, or matches nothing.
    """
    found: set[str] = set()
    for pattern in patterns:
        try:
            matches = {name for name in names if re.fullmatch(pattern, name)}
        except re.error as error:
            raise ValueError(
                f"{setting} holds {pattern!r}, which is no regular expression: {error}"
            ) from error
        if not matches:
            raise ValueError(
                f"{setting} holds {pattern!r}, which matches the whole name of no "
                f"parameter; choose from {list(names)}"
            )
        found |= matches
    return found


def split(params: PyTree, frozen: PyTree) -> tuple[PyTree, PyTree]:
    """Return the tree of the trained params and the tree of the frozen ones.

    `frozen` has a bool for each leaf; `params` and `frozen` are nested dicts.
    """

    def part(params: PyTree, frozen: PyTree, wanted: bool) -> PyTree:
        if not isinstance(params, dict):
            return params if frozen == wanted else None
        parts = {name: part(params[name], frozen[name], wanted) for name in params}
        return {name: each for name, each in parts.items() if each is not None} or None

    return part(params, frozen, False), part(params, frozen, True)
