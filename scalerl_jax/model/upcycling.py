"""A mixture out of a dense decoder: experts take parts of its feed-forward.

Sparse upcycling (Komatsuzaki et al., https://arxiv.org/abs/2212.05055) copies the whole
feed-forward into every expert, and equal experts must grow apart.  Here an expert takes
its own part of the hidden units, so that they differ from the start.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from scalerl_jax.model.architecture import Architecture
from scalerl_jax.types import PyTree


def upcycle(
    params: PyTree, dense: Architecture, start: PyTree, arch: Architecture, *, seed: int
) -> PyTree:
    """Return a mixture that has the router of `start`, and all else of a dense decoder.

        units(e)  = part e % p of a random order of the units, p = F / f
        expert(e) = the dense feed-forward of units(e), with p times its output

    Every p experts in turn share an order: together, with gates of 1 / p, they are the
    dense feed-forward.

    Args:
        params: the dense decoder's.
        dense: its shape, with a feed-forward of F units.
        start: random parameters of `arch`.
        arch: the mixture's shape, with experts of f units.
        seed: of the orders, which differ by layer.

    Raises:
        ValueError: names what keeps the one from becoming the other.
    """
    count, parts = _count_and_parts(dense, arch)
    units = draw_units(count, parts, dense.ffn_size, arch.num_layers, seed=seed)
    layers = dict(params["layers"])
    gate, up, down = (layers.pop(name) for name in ("gate", "up", "down"))
    gate_up = jnp.stack([_columns(gate, units), _columns(up, units)], axis=3)
    layers["expert_gate_up"] = gate_up
    layers["expert_down"] = parts * _columns(down.mT, units).mT
    layers["router"] = start["layers"]["router"]
    return params | {"layers": layers}


def draw_units(
    count: int, parts: int, ffn_size: int, num_layers: int, *, seed: int
) -> Int[np.ndarray, "L E f"]:
    """Draw the units of every expert: `parts` experts in turn have all of them once."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(ffn_size) for _ in range(num_layers * count // parts)]
    return np.stack(orders).reshape(num_layers, count, ffn_size // parts)


def _columns(
    matrices: Float[Array, "L D F"], units: Int[np.ndarray, "L E f"]
) -> Float[Array, "L E D f"]:
    """Each expert's columns of its layer's matrix."""
    places = jnp.asarray(units)[:, :, None, :]
    return jnp.take_along_axis(matrices[:, None], places, axis=3)


def _count_and_parts(dense: Architecture, arch: Architecture) -> tuple[int, int]:
    """Numbers of experts, and of the parts in which they cut the feed-forward."""
    if arch.experts is None or dense.experts is not None:
        raise ValueError("a dense decoder becomes a mixture: num_experts above 0")
    wanted = dataclasses.replace(
        dense, family=arch.family, ffn_size=arch.ffn_size, experts=arch.experts
    )
    for field in dataclasses.fields(Architecture):
        here, there = getattr(arch, field.name), getattr(wanted, field.name)
        if here != there:
            raise ValueError(f"{field.name} = {here} must be as there: {there}")
    count = arch.experts.count
    parts, rest = divmod(dense.ffn_size, arch.ffn_size)
    if rest or count % max(parts, 1):
        raise ValueError(
            f"ffn_size = {arch.ffn_size} must cut the {dense.ffn_size} hidden units "
            f"there into parts whose number divides num_experts = {count}"
        )
    return count, parts
