"""AdamW with global-norm clipping: its schedule, frozen parameters and rounding.

A frozen parameter has no update, no weight decay and no moments, and its gradient is
zeros: it counts for no norm, and the compiler drops what would compute it.
"""

import math
import re
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from scalerl_jax.types import PyTree


def scaled_rate(learning_rate: float, *, rollouts: int, base_rollouts: int) -> float:
    """Learning rate, scaled from the batch size that it was chosen for to another.

        learning_rate * sqrt(rollouts / base_rollouts)

    IsoCompute Playbook, https://arxiv.org/abs/2603.12151: 1e-6 at 1024 rollouts; at
    8192 a constant rate was too slow and a linear one unstable.
    """
    return learning_rate * math.sqrt(rollouts / base_rollouts)


def make_schedule(
    *,
    learning_rate: float,
    warmup_steps: int,
    decay_steps: int = 0,
    final_share: float = 0.0,
) -> optax.Schedule:
    """Make a function from optimizer steps applied to the rate of the next one.

        warm(n) = min(1, (n + 1) / warmup_steps)
        fall(n) = f + (1 - f) * (1 + cos(pi * min(1, n / decay_steps))) / 2
        rate(n) = learning_rate * warm(n) * fall(n),    f = final_share

    With `decay_steps` = 0 nothing falls: ScaleRL's constant rate after a linear
    warm-up, https://arxiv.org/abs/2510.13786, appendix A.3.  The cosine is that of
    SGDR, https://arxiv.org/abs/1608.03983, equation 5, in one cycle.
    """
    warm = optax.constant_schedule(learning_rate)
    if warmup_steps > 1:
        first = learning_rate / warmup_steps
        warm = optax.linear_schedule(first, learning_rate, warmup_steps - 1)
    if not decay_steps:
        return warm
    fall = optax.cosine_decay_schedule(1.0, decay_steps, alpha=final_share)
    return lambda count: warm(count) * fall(count)


def make_optimizer(
    schedule: optax.Schedule,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
) -> optax.GradientTransformation:
    """Make ScaleRL's optimizer, https://arxiv.org/abs/2510.13786, appendix A.3.

    A `max_grad_norm` of 0 clips nothing.  `eps` is 1e-15 there, because the gradients
    of a large policy are far below Adam's usual 1e-8.
    """
    adamw = optax.adamw(
        schedule, b1=beta1, b2=beta2, eps=eps, weight_decay=weight_decay
    )
    if max_grad_norm == 0.0:
        return adamw
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw)


def freeze(
    optimizer: optax.GradientTransformation, patterns: Sequence[str]
) -> optax.GradientTransformation:
    """Return the optimizer restricted to parameters that no pattern freezes."""
    if not patterns:
        return optimizer

    def frozen(params: PyTree) -> PyTree:
        return frozen_params(params, patterns)

    def trained(params: PyTree) -> PyTree:
        return jax.tree.map(lambda held: not held, frozen(params))

    return optax.chain(
        optax.masked(optimizer, trained), optax.masked(optax.set_to_zero(), frozen)
    )


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


def is_absent(moment: Any) -> bool:
    """Return whether a leaf replaces the moment that a frozen parameter lacks."""
    return isinstance(moment, optax.MaskedNode)


def round_stochastically(tree: PyTree, *, like: PyTree, seed: Int[Array, ""]) -> PyTree:
    """Round float32 leaves at random to values of the dtypes of the leaves in `like`.

        P(up) = (x - down) / (up - down)

    A bfloat16 weight of 1 ignores every update below 1/256, however often it comes;
    rounded so, it moves by the update on average.  Leaves stay float32; bfloat16 is the
    only narrower dtype.  The draws depend on `seed` and on the leaf's path.
    https://arxiv.org/abs/2010.06192, section 3.
    """
    key = jax.random.fold_in(jax.random.key(0x5EED), seed)

    def leaf(path: tuple, x: Array, target: Array) -> Array:
        if target.dtype == x.dtype:
            return x
        name = zlib.crc32(jax.tree_util.keystr(path).encode())
        noise = jax.random.bits(jax.random.fold_in(key, name), x.shape, jnp.uint16)
        # bfloat16 is the upper half of a float32: noise added to the lower half carries
        # into it with the right probability.  An infinity keeps its empty lower half.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        noisy = (bits + noise.astype(jnp.uint32)) & jnp.uint32(0xFFFF0000)
        return jnp.where(
            jnp.isfinite(x), jax.lax.bitcast_convert_type(noisy, jnp.float32), x
        )

    return jax.tree_util.tree_map_with_path(leaf, tree, like)
