"""The gradient of log-probabilities and entropies, whose logits are made again.

It goes slab by slab over the vocabulary, for heads of more than `chunk_vocab` rows and
for losses of whole sequences.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from scalerl_jax.learner.head import HEAD, HIDDEN, TOKENS, Head
from scalerl_jax.parallel.mesh import over_mesh


def gradient(
    head: Head, saved: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Return the cotangents of the hidden states and of the head.

    `saved` has hidden states, head, targets, entropies and log-normalisers.
    """
    tokens = (TOKENS,) * 5
    return over_mesh(
        head.mesh,
        functools.partial(_backward_tiles, head),
        in_specs=(HIDDEN, HEAD, *tokens),
        out_specs=(HIDDEN, HEAD),
    )(*saved, *cotangents)  # type: ignore[call-arg]


def _backward_tiles(
    head: Head,
    hidden: Array,
    weights: Array,
    targets: Array,
    entropy: Array,
    log_z: Array,
    of_logprobs: Array,
    of_entropy: Array,
) -> tuple[Array, Array]:
    """Cotangents of the hidden states and of this device's part of the head.

    d logprob / d logit[v] = [v is the target] - p[v]
    d entropy / d logit[v] = -p[v] (log p[v] + entropy)
    """
    chunk, slabs = head.tiles(hidden, weights)
    rows = hidden.reshape(-1, chunk, hidden.shape[-1])
    ids = targets.reshape(-1, chunk) - head.first_id(weights)
    tokens = [x.reshape(-1, chunk) for x in (entropy, log_z, of_logprobs, of_entropy)]
    exact = head.product()

    # Tiles are [v, c] and sums over tiles [D, c], as in `logprobs`.
    def one_slab(
        of_rows: Array, numbered: tuple[Array, Array]
    ) -> tuple[Array, Float[Array, "v columns"]]:
        number, part = numbered
        slab = head.gather(part, hidden.dtype)
        columns = jax.lax.optimization_barrier(slab.T)
        places = jnp.arange(slab.shape[0])[:, None] + number * slab.shape[0]

        def one_chunk(
            of_slab: Array, each: tuple[Array, ...]
        ) -> tuple[Array, Float[Array, "D c"]]:
            of_rows, hidden, ids, entropy, log_z, of_logprob, of_entropy = each
            hidden = hidden.astype(slab.dtype)
            logprobs = head.logits(slab, hidden) - log_z
            slope = of_logprob + of_entropy * (logprobs + entropy)
            chosen = jnp.where(ids == places, of_logprob, 0.0)
            of_logits = (chosen - jnp.exp(logprobs) * slope) / head.temperature
            of_logits = of_logits.astype(slab.dtype)
            of_rows = of_rows + exact("dv,vc->dc", columns, of_logits)
            return of_slab + exact("vc,cd->vd", of_logits, hidden), of_rows

        of_slab, of_rows = jax.lax.scan(
            one_chunk, jnp.zeros(slab.shape), (of_rows, rows, ids, *tokens)
        )
        return of_rows, head.scatter(of_slab).astype(weights.dtype)

    numbered = (jnp.arange(slabs.shape[0]), slabs)
    of_rows, of_slabs = jax.lax.scan(
        one_slab, jnp.zeros(rows.swapaxes(1, 2).shape, jnp.float32), numbered
    )
    return head.summed(of_rows, of_slabs, hidden, weights)
