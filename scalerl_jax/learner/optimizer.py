"""AdamW with global-norm clipping and a linear warm-up to a constant rate."""

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array


def make_optimizer(
    *,
    learning_rate: float,
    warmup_steps: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
    decay_steps: int = 0,
) -> optax.GradientTransformation:
    """ScaleRL's optimizer, https://arxiv.org/abs/2510.13786, appendix A.3.

    Step n (from 1) runs at learning_rate * min(1, n / warmup_steps); with
    `decay_steps` that falls along half a cosine to 0 at that step.  A
    `max_grad_norm` of 0 clips nothing.  `eps` is 1e-15 there, because the gradients
    of a large policy are far below Adam's usual 1e-8.
    """

    def rate(count: ArrayLike) -> Array:
        count = jnp.asarray(count)
        warm = learning_rate * jnp.minimum(1.0, (count + 1) / max(warmup_steps, 1))
        if decay_steps == 0:
            return warm
        return (
            warm * 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.minimum(count / decay_steps, 1)))
        )

    adamw = optax.adamw(rate, b1=beta1, b2=beta2, eps=eps, weight_decay=weight_decay)
    if max_grad_norm == 0.0:
        return adamw
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw)
