"""Trained low-rank factors beside frozen weights.

    W' = W + scale * down @ up,   scale = alpha / rank,   up = 0 at the start

LoRA, https://arxiv.org/abs/2106.09685, equation 3.  `join` makes one tree of the two of
`trainable`; an adapted weight is an `Adapted` in it.  `layers.linear` multiplies by its
parts one after the other, so that the factors' product is never computed.  `merged`
adds the product to the weight, for sampling, exports and weights of experts.
"""

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from scalerl_jax.config import LoraConfig, ModelConfig
from scalerl_jax.model.architecture import (
    Architecture,
    ParamSpec,
    learner_sharding,
    parameter_table,
)
from scalerl_jax.model.trainable import matching
from scalerl_jax.types import PyTree
from scalerl_jax.weights.shards import named_leaves

# Adaptable weights of a layer, with or without experts; the router is excluded.
_LINEAR = re.compile(
    r"layers/(query|key|value|output|gate|up|down|shared_(gate|up|down)"
    r"|expert_(gate_up|down))"
)
# Leading dimensions of a weight that stack matrices.
_STACKS = ("layers", "experts")


@struct.dataclass(kw_only=True)
class Factors:
    """The two factors of a weight's change, float32, stacked by layer and expert."""

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


def factor_table(arch: Architecture, lora: LoraConfig) -> PyTree:
    """Return `Factors` of `ParamSpec`s for each target, in the tree of the params.

    Raises:
        ValueError: a target matches no parameter, or one that is no matrix of a layer,
            or the rank is above a matrix's dimensions.
    """
    specs = named_leaves(parameter_table(arch))
    if lora.targets:
        targets = matching(list(specs), lora.targets, setting="model.lora.targets")
    else:
        targets = {name for name in specs if _LINEAR.fullmatch(name)}
    layers = {}
    for name in sorted(targets):
        if not _LINEAR.fullmatch(name):
            raise ValueError(
                f"model.lora.targets matches {name!r}, which is no matrix of attention "
                f"or of a feed-forward; choose from "
                f"{[each for each in specs if _LINEAR.fullmatch(each)]}"
            )
        layers[name.removeprefix("layers/")] = _factors(name, specs[name], lora)
    return {"layers": layers}


def _factors(name: str, spec: ParamSpec, lora: LoraConfig) -> Any:
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


def init_factors(arch: Architecture, lora: LoraConfig, key: Array) -> PyTree:
    """Return factors whose product is 0, float32.

        down ~ U(-1 / sqrt(inputs), 1 / sqrt(inputs)),   up = 0

    This is `peft`'s initialisation, Kaiming's for a = sqrt(5).
    """
    leaves, treedef = jax.tree.flatten(factor_table(arch, lora))

    def start(spec: ParamSpec, key: Array) -> Array:
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, jnp.float32)
        bound = spec.shape[-2] ** -0.5
        return jax.random.uniform(key, spec.shape, minval=-bound, maxval=bound)

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(treedef, [*map(start, leaves, keys)])


def abstract_factors(arch: Architecture, lora: LoraConfig, mesh: Mesh) -> PyTree:
    """Return the factors' shapes, dtypes and shardings, which follow their weights'."""

    def leaf(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        sharding: NamedSharding = learner_sharding(spec, mesh)
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=sharding)

    return jax.tree.map(leaf, factor_table(arch, lora))


def join(trained: PyTree, frozen: PyTree | None) -> PyTree:
    """Return one tree from a trained and a frozen one; factors join their weights."""
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


class Sizes(NamedTuple):
    """Numbers of trained and frozen params."""

    trained: float
    frozen: float


def sizes(model: ModelConfig, arch: Architecture, *, products: bool = False) -> Sizes:
    """Return the numbers of trained and frozen params; factors are trained.

    With `products` only those count by which a token is multiplied, including the head;
    of the experts only the share that a token uses.
    """
    specs = named_leaves(parameter_table(arch))
    own = dict(specs)
    if products and not arch.tied_embeddings:
        del own["embedding"]  # it is looked up

    def size(spec: ParamSpec) -> float:
        if not products:
            return spec.size
        share = 0.0 if spec.is_vector else 1.0
        if "experts" in spec.axes and arch.experts is not None:
            share = arch.experts.top_k / arch.experts.count
        return share * spec.size

    if model.lora.rank:
        made = jax.tree.leaves(factor_table(arch, model.lora))
        return Sizes(sum(map(size, made)), sum(map(size, own.values())))
    held: set[str] = set()
    if model.frozen:
        held = matching(list(specs), model.frozen, setting="model.frozen")
    frozen = sum(size(spec) for name, spec in own.items() if name in held)
    return Sizes(sum(map(size, own.values())) - frozen, frozen)
