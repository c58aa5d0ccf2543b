"""Weights of tokens in the loss.

Every weighting is zero outside its mask and sums to 1 over the GLOBAL batch, but for
`constant_weights`.  It is computed before the batch is cut, so that the gradient does
not depend on microbatches, packing or devices.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def prompt_weights(mask: Bool[Array, "B T"], *, group_size: int) -> Float[Array, "B T"]:
    """Every prompt alike; the tokens of its group share its part evenly.

        w[b, t] = mask[b, t] / (tokens of b's group) / (groups with a token)

    ScaleRL, https://arxiv.org/abs/2510.13786, equation 4 and section 3.2; DAPO as its
    paper has it, https://arxiv.org/abs/2503.14476, equation 8.
    """
    counts = mask.astype(jnp.float32)
    groups = counts.reshape(-1, group_size, mask.shape[1])
    tokens = groups.sum(axis=(1, 2), keepdims=True)
    shares = groups / jnp.maximum(tokens, 1.0)
    return (shares / jnp.maximum((tokens > 0).sum(), 1)).reshape(counts.shape)


def sample_weights(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Every rollout alike; its tokens share its part evenly.

        w[b, t] = mask[b, t] / (tokens of b) / (rollouts with a token)

    GRPO, https://arxiv.org/abs/2402.03300, equation 3.
    """
    return prompt_weights(mask, group_size=1)


def token_weights(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Every token of the batch alike:  w[b, t] = mask[b, t] / (tokens of the batch).

    DAPO as it is implemented, https://arxiv.org/abs/2503.14476.
    """
    counts = mask.astype(jnp.float32)
    return counts / jnp.maximum(counts.sum(), 1.0)


def constant_weights(
    mask: Bool[Array, "B T"], *, max_tokens: int
) -> Float[Array, "B T"]:
    """Every token alike, and alike in every batch.

        w[b, t] = mask[b, t] / (B * max_tokens)

    They sum to the mean length over max_tokens, at most 1: a short batch is a small
    step.  B counts all rollouts, filtered ones too; max_tokens is the longest
    completion there may be.  Dr. GRPO, https://arxiv.org/abs/2503.20783, appendix.
    """
    return mask.astype(jnp.float32) / (mask.shape[0] * max_tokens)
