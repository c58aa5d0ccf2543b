"""What a token counts for in the loss.

Every weighting is zero outside its mask and sums to 1 over the GLOBAL batch.  It is
computed before the batch is cut, so that the gradient does not depend on
microbatches, packing or devices.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def prompt_weights(mask: Bool[Array, "B T"], *, group_size: int) -> Float[Array, "B T"]:
    """Every prompt alike; the tokens of its group share its part evenly.

        w[b, t] = mask[b, t] / (tokens of b's group) / (groups with a token)

    ScaleRL, https://arxiv.org/abs/2510.13786, equation 4 and section 3.2.
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
