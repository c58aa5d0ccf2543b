"""Params as two trees, trainable and frozen, and low-rank factors beside the frozen.

    W' = W + scale * down @ up,   scale = alpha / rank,   up = 0 at the start

LoRA, https://arxiv.org/abs/2106.09685, equation 3.  `join` makes one tree of the two,
in which an adapted weight is an `Adapted`; `layers.linear` multiplies by both parts
one after the other, so that no product of the factors exists.  `merged` adds the
product to the weight, for who samples, exports or has weights of experts.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from scalerl_jax.model.architecture import (
    Architecture,
    ParamSpec,
    learner_sharding,
    parameter_table,
)
from scalerl_jax.types import PyTree

# Of a layer, with experts or without; not the router, which is no linear layer.
LINEAR = (
    r"layers/(query|key|value|output|gate|up|down|shared_(gate|up|down))",
    r"layers/expert_(gate_up|down)",
)
# Dimensions of a weight that are not those of its input: stacks, and its outputs.
_STACKS = ("layers", "experts")


@struct.dataclass(kw_only=True)
class Factors:
    """The two factors of a weight's change, float32; layers and experts are stacked."""

    down: Array  # [..., inputs, rank]
    up: Array  # [..., rank, outputs]
    scale: float = struct.field(pytree_node=False)


@struct.dataclass(kw_only=True)
class Adapted:
    """A weight and the factors beside it."""

    weights: Array
    factors: Factors

    def merged(self) -> Array:
        """Return the weight with the product of the factors, in the weight's dtype."""
        down, up = self.factors.down, self.factors.up
        change = jnp.einsum(
            "...ir,...rp->...ip",
            down,
            up.reshape(*down.shape[:-2], down.shape[-1], -1),
            precision=jax.lax.Precision.HIGHEST,
        ).reshape(self.weights.shape)
        whole = self.weights.astype(jnp.float32) + self.factors.scale * change
        return whole.astype(self.weights.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Which weights get factors, of what rank, and how their product is scaled."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()  # patterns of whole names; empty: `LINEAR`


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
                f"parameter; there are {list(names)}"
            )
        found |= matches
    return found


def param_names(tree: PyTree) -> list[str]:
    """Return the names of parameters: "embedding", "layers/query"."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def factor_table(arch: Architecture, lora: Lora) -> PyTree:
    """Return `Factors` of `ParamSpec`s for each target, in the tree of the params.

    Raises:
        ValueError: the targets match nothing or what is no matrix of a layer, or the
            rank is above a matrix's dimensions.
    """
    table = parameter_table(arch)
    specs = dict(zip(param_names(table), jax.tree.leaves(table), strict=True))
    if lora.targets:
        targets = matching(list(specs), lora.targets, setting="model.lora.targets")
    else:
        patterns = "|".join(LINEAR)
        targets = {name for name in specs if re.fullmatch(patterns, name)}
    layers = {}
    for name in sorted(targets):
        if not re.fullmatch("|".join(LINEAR), name):
            raise ValueError(
                f"model.lora.targets matches {name!r}, which is no matrix of attention "
                f"or of a feed-forward; there are "
                f"{[each for each in specs if re.fullmatch('|'.join(LINEAR), each)]}"
            )
        layers[name.removeprefix("layers/")] = _factors(name, specs[name], lora)
    return {"layers": layers}


def _factors(name: str, spec: ParamSpec, lora: Lora) -> Any:
    stacked = sum(axis in _STACKS for axis in spec.axes)
    (size, *outputs), (axis, *out_axes) = spec.shape[stacked:], spec.axes[stacked:]
    if lora.rank > (limit := min(size, math.prod(outputs))):
        raise ValueError(
            f"model.lora.rank = {lora.rank} is above {limit}, the smaller dimension of "
            f"{name} ({size} x {math.prod(outputs)}); use at most {limit}, or leave it "
            f"out of model.lora.targets"
        )
    stacks, stack_axes = spec.shape[:stacked], spec.axes[:stacked]
    down = ParamSpec((*stacks, size, lora.rank), (*stack_axes, axis, "rank"))
    up = ParamSpec(
        (*stacks, lora.rank, *outputs), (*stack_axes, "rank", *out_axes), "zeros"
    )
    return Factors(down=down, up=up, scale=lora.alpha / lora.rank)  # type: ignore


def init_factors(arch: Architecture, lora: Lora, key: Array) -> PyTree:
    """Return factors whose product is 0, float32.

        down ~ U(-1 / sqrt(inputs), 1 / sqrt(inputs)),   up = 0

    That is the start of `peft`, Kaiming's for a = sqrt(5).
    """
    leaves, treedef = jax.tree.flatten(factor_table(arch, lora))

    def start(spec: ParamSpec, key: Array) -> Array:
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, jnp.float32)
        bound = spec.shape[-2] ** -0.5
        return jax.random.uniform(key, spec.shape, minval=-bound, maxval=bound)

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(treedef, [*map(start, leaves, keys)])


def abstract_factors(arch: Architecture, lora: Lora, mesh: Mesh) -> PyTree:
    """Return shapes, dtypes and shardings of the factors, cut as their weights are."""

    def leaf(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        sharding: NamedSharding = learner_sharding(spec, mesh)
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=sharding)

    return jax.tree.map(leaf, factor_table(arch, lora))


def split(params: PyTree, frozen: PyTree) -> tuple[PyTree, PyTree]:
    """Return the params that are trained and those that are not, each without the rest.

    `frozen` has a bool for each leaf, and params and it are nested dicts.
    """

    def part(params: PyTree, frozen: PyTree, wanted: bool) -> PyTree:
        if not isinstance(params, dict):
            return params if frozen == wanted else None
        parts = {name: part(params[name], frozen[name], wanted) for name in params}
        return {name: each for name, each in parts.items() if each is not None} or None

    return part(params, frozen, False), part(params, frozen, True)


def join(trained: PyTree, frozen: PyTree | None) -> PyTree:
    """Return one tree of the two of `split`; factors stand beside their weights."""
    if frozen is None or trained is None:
        return trained if frozen is None else frozen
    if isinstance(trained, Factors):
        return Adapted(weights=frozen, factors=trained)
    return {
        name: join(trained.get(name), frozen.get(name)) for name in frozen | trained
    }


def merged(params: PyTree) -> PyTree:
    """Return the params with every product of factors added to its weight."""

    def is_adapted(leaf: Any) -> bool:
        return isinstance(leaf, Adapted)

    return jax.tree.map(
        lambda leaf: leaf.merged() if is_adapted(leaf) else leaf,
        params,
        is_leaf=is_adapted,
    )
