"""Weights of tokens that other recipes have in place of ScaleRL's prompt average.

As `advantages.prompt_weights` they are zero outside their mask and sum to 1 over the
GLOBAL batch, except `constant_weights`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from scalerl_jax.algo.advantages import prompt_weights


def sample_weights(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Token weights that give every rollout the same total, spread over its tokens.

        w[b, t] = mask[b, t] / (tokens of b) / (rollouts with a token)

    GRPO, https://arxiv.org/abs/2402.03300, equation 3.
    """
    return prompt_weights(mask, group_size=1)


def token_weights(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Token weights that are all equal:  w[b, t] = mask[b, t] / (tokens of the batch).

    DAPO as it is implemented, https://arxiv.org/abs/2503.14476.
    """
    counts = mask.astype(jnp.float32)
    return counts / jnp.maximum(counts.sum(), 1.0)


def constant_weights(
    mask: Bool[Array, "B T"], *, max_tokens: int
) -> Float[Array, "B T"]:
    """Token weights that are equal within a batch and from batch to batch.

        w[b, t] = mask[b, t] / (B * max_tokens)

    They sum to the mean length over max_tokens, at most 1: a short batch is a small
    step.  B counts all rollouts, filtered ones too; max_tokens is the longest
    completion there may be.  Dr. GRPO, https://arxiv.org/abs/2503.20783, appendix.
    """
    return mask.astype(jnp.float32) / (mask.shape[0] * max_tokens)
