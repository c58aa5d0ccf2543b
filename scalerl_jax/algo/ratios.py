"""Ratios of two policies on a token, bounded so that nothing overflows."""

import jax.numpy as jnp
from jaxtyping import Array, Float

# Past it a ratio and its gradient are constant: e^20 = 5e8 is no weight that anybody
# wants, and e^89 is infinite in float32, whose zero multiples are NaN.  verl's bound.
MAX_LOG_RATIO = 20.0
# No float32 softmax gives less than minus this; larger differences have no gradient.
MAX_NATS = 1e4


def log_ratio(
    logprobs: Float[Array, "..."], anchor_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
    """clip(logprob - anchor_logprob, -MAX_NATS, MAX_NATS), in nats."""
    return jnp.clip(logprobs - anchor_logprobs, -MAX_NATS, MAX_NATS)


def bounded_exp(log_ratios: Float[Array, "..."]) -> Float[Array, "..."]:
    """exp(min(log_ratio, MAX_LOG_RATIO)): finite, as are its gradients."""
    return jnp.exp(jnp.minimum(log_ratios, MAX_LOG_RATIO))


def importance_ratio(
    logprobs: Float[Array, "..."], anchor_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
    """exp(logprob - anchor_logprob): the trained policy's probability over another's.

    Constant past e^20; see `MAX_LOG_RATIO`.
    """
    return bounded_exp(log_ratio(logprobs, anchor_logprobs))
