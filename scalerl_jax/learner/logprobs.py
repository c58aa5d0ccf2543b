"""Log-probabilities and entropies from hidden states, a chunk of tokens at a time.

The logits of a whole row never exist: each chunk's are made, used and dropped, and
made again in the backward pass.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from scalerl_jax.model.transformer import head_logits


def token_logprobs(
    hidden: Float[Array, "R S D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "R S"],
    *,
    temperature: float,
    float32_head: bool,
    chunk_tokens: int,
) -> tuple[Float[Array, "R S"], Float[Array, "R S"]]:
    """Log-probability of each target, and entropy of its distribution, in nats.

        p = softmax(logits / temperature),  entropy = -sum_v p[v] log p[v]

    At most `chunk_tokens` tokens (and one per row at the least) have logits at a time.
    """
    rows, length, width = hidden.shape
    chunk = _chunk_length(length, max(1, chunk_tokens // rows))

    @jax.checkpoint
    def one_chunk(
        hidden: Float[Array, "R chunk D"], targets: Int[Array, "R chunk"]
    ) -> tuple[Float[Array, "R chunk"], Float[Array, "R chunk"]]:
        logits = head_logits(hidden, head, float32_head=float32_head) / temperature
        log_z = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        probs = jnp.exp(logits - log_z[..., None])
        return chosen - log_z, log_z - (probs * logits).sum(axis=-1)

    if chunk == length:
        return one_chunk(hidden, targets)
    pieces = (
        hidden.reshape(rows, -1, chunk, width).swapaxes(0, 1),
        targets.reshape(rows, -1, chunk).swapaxes(0, 1),
    )
    logprobs, entropy = jax.lax.map(lambda piece: one_chunk(*piece), pieces)
    return (
        logprobs.swapaxes(0, 1).reshape(rows, length),
        entropy.swapaxes(0, 1).reshape(rows, length),
    )


def _chunk_length(length: int, most: int) -> int:
    """The largest divisor of `length` that is at most `most`."""
    return max(n for n in range(1, min(length, most) + 1) if length % n == 0)
