"""Upcycling of a dense decoder to a mixture: experts get parts of its feed-forward.

Sparse upcycling (Komatsuzaki et al., https://arxiv.org/abs/2212.05055) copies the whole
feed-forward into every expert, so that experts start equal.  Here each expert gets its
own part of the hidden units, so that they differ from the start.
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
    """Return a mixture with the router of `start`, and the rest of a dense decoder.

        units(e)  = part e % p of a random order of the units, p = F / f
        expert(e) = the dense feed-forward of units(e), with p times its output

    Each p consecutive experts share an order: together, with gates of 1 / p, they are
    the dense feed-forward.

    Args:
        params: the dense decoder's params.
        dense: its architecture, with a feed-forward of F units.
        start: random params of `arch`.
        arch: the mixture's architecture, with experts of f units.
        seed: seed of the orders, which differ by layer.

    Raises:
        ValueError: names the field in which the architectures do not fit.
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
    """Draw each expert's units; every `parts` consecutive experts have all once."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(ffn_size) for _ in range(num_layers * count // parts)]
    return np.stack(orders).reshape(num_layers, count, ffn_size // parts)


def _columns(
    matrices: Float[Array, "L D F"], units: Int[np.ndarray, "L E f"]
) -> Float[Array, "L E D f"]:
    """Return each expert's columns of its layer's matrix."""
    places = jnp.asarray(units)[:, :, None, :]
    return jnp.take_along_axis(matrices[:, None], places, axis=3)


def _count_and_parts(dense: Architecture, arch: Architecture) -> tuple[int, int]:
    """Return the number of experts, and of parts of the feed-forward."""
    if arch.experts is None or dense.experts is not None:
        raise ValueError("a dense decoder becomes a mixture: num_experts above 0")
    wanted = dataclasses.replace(
        dense, family=arch.family, ffn_size=arch.ffn_size, experts=arch.experts
    )
    for field in dataclasses.fields(Architecture):
        here, there = getattr(arch, field.name), getattr(wanted, field.name)
        if here != there:
            raise ValueError(
                f"{field.name} = {here} must be the dense decoder's: {there}"
            )
    count = arch.experts.count
    parts, rest = divmod(dense.ffn_size, arch.ffn_size)
    if rest or count % max(parts, 1):
        raise ValueError(
            f"ffn_size = {arch.ffn_size} must divide the dense decoder's "
            f"{dense.ffn_size} hidden units into parts whose number divides "
            f"num_experts = {count}"
        )
    return count, parts
