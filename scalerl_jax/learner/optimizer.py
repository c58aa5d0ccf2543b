"""AdamW with global-norm clipping, and the schedule of its rate."""

import zlib

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from scalerl_jax.types import PyTree


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
