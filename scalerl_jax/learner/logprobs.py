"""Log-probabilities and entropies of tokens from hidden states, without their logits.

No [T, V] array exists, forward or backward: a tile of `chunk_tokens` tokens and
`chunk_vocab` entries of the vocabulary is computed, folded into sums over the
vocabulary, and dropped; the backward pass makes the tiles again, or, where a tile has
all of the vocabulary, both passes are made of it at once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from scalerl_jax.learner.head import Head
from scalerl_jax.model.layers import HIDDEN, TABLE, TOKENS
from scalerl_jax.parallel.mesh import largest_divisor, over_mesh
from scalerl_jax.types import PyTree

# logprobs, entropies, further per-token arrays -> each token's term of the loss
Pointwise = Callable[[Array, Array, PyTree], Array]

_LOWEST = -1e30  # below every logit, and finite


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def token_logprobs(
    hidden: Float[Array, "R S D"],
    weights: Float[Array, "V D"],
    targets: Int[Array, "R S"],
    head: Head,
) -> tuple[Float[Array, "R S"], Float[Array, "R S"]]:
    """Log-probability of each target, and entropy of its distribution, in nats.

    p = softmax(logits / temperature),  entropy = -sum_v p[v] log p[v]
    """
    return _forward(hidden, weights, targets, head)[0]


def _forward(
    hidden: Array, weights: Array, targets: Array, head: Head
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    logprobs, entropy, log_z = over_mesh(
        head.mesh,
        functools.partial(_forward_tiles, head),
        in_specs=(HIDDEN, TABLE, TOKENS),
        out_specs=(TOKENS,) * 3,
    )(hidden, weights, targets)
    return (logprobs, entropy), (hidden, weights, targets, entropy, log_z)


def _backward(
    head: Head, saved: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    return *_gradient(head, saved, cotangents), None


token_logprobs.defvjp(_forward, _backward)


def _forward_tiles(
    head: Head, hidden: Array, weights: Array, targets: Array
) -> tuple[Array, Array, Array]:
    """Log-probabilities, entropies and log-normalisers of this device's tokens."""
    chunk, slabs = head.tiles(hidden, weights)
    rows = hidden.reshape(-1, chunk, hidden.shape[-1])
    ids = targets.reshape(-1, chunk) - head.first_id(weights)

    def meet(sums: tuple[Array, ...], tile: tuple[Array, ...]) -> tuple[Array, ...]:
        """Fold the logits of a tile into its tokens' sums."""
        best, total, below, chosen = sums
        hidden, ids, slab = tile
        logits = head.logits(hidden, slab)
        higher = jnp.maximum(best, logits.max(axis=-1))
        shift, short = best - higher, logits - higher[:, None]
        shrink, parts = jnp.exp(shift), jnp.exp(short)
        here = (ids >= 0) & (ids < slab.shape[0])
        found = jnp.take_along_axis(logits, jnp.where(here, ids, 0)[:, None], axis=1)
        return (
            higher,
            total * shrink + parts.sum(axis=-1),
            (below + total * shift) * shrink + (parts * short).sum(axis=-1),
            jnp.where(here, found[:, 0], chosen),
        )

    def one_slab(
        sums: tuple[Array, ...], numbered: tuple[Array, Array]
    ) -> tuple[tuple[Array, ...], None]:
        number, slab = numbered
        slab = head.gather(slab, hidden.dtype)
        local = ids - number * slab.shape[0]
        found = jax.lax.map(
            lambda each: meet(each[:4], (*each[4:], slab)), (*sums, rows, local)
        )
        return found, None

    start = (jnp.full(ids.shape, _LOWEST), *(jnp.zeros(ids.shape) for _ in range(3)))
    numbered = (jnp.arange(slabs.shape[0]), slabs)
    (best, total, below, chosen), _ = jax.lax.scan(one_slab, start, numbered)
    if head.mesh is not None:
        highest = jax.lax.pmax(best, "tensor")
        shift = best - highest
        parts = (total, below + total * shift)
        (total, below), chosen = jax.lax.psum(
            ([part * jnp.exp(shift) for part in parts], chosen), "tensor"
        )
        best = highest
    # Relative to the highest logit: log Z may be too large to hold log(total).
    log_total = jnp.log(total)
    found = (chosen - best - log_total, log_total - below / total, best + log_total)
    return tuple(x.reshape(targets.shape) for x in found)  # type: ignore[return-value]


def _gradient(
    head: Head, saved: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Return the cotangents of the hidden states and of the head.

    `saved` has hidden states, head, targets, entropies and log-normalisers.
    """
    tokens = (TOKENS,) * 5
    return over_mesh(
        head.mesh,
        functools.partial(_backward_tiles, head),
        in_specs=(HIDDEN, TABLE, *tokens),
        out_specs=(HIDDEN, TABLE),
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
    product, dtype = head.gradient_product(), hidden.dtype

    # Tiles are [v, c] and sums over tiles [D, c], as in `_pointwise_tiles`.
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
            logits = head.logits(slab, hidden)
            logprobs = logits - log_z
            slope = of_logprob + of_entropy * (logprobs + entropy)
            chosen = jnp.where(ids == places, of_logprob, 0.0)
            of_logits = chosen - jnp.exp(logprobs) * slope
            of_logits = head.of_product(of_logits, logits, dtype)
            of_rows = of_rows + product("dv,vc->dc", columns, of_logits)
            return of_slab + product("vc,cd->vd", of_logits, hidden), of_rows

        of_slab, of_rows = jax.lax.scan(
            one_chunk, jnp.zeros(slab.shape), (of_rows, rows, ids, *tokens)
        )
        return of_rows, head.scatter(of_slab).astype(weights.dtype)

    numbered = (jnp.arange(slabs.shape[0]), slabs)
    of_rows, of_slabs = jax.lax.scan(
        one_slab, jnp.zeros(rows.swapaxes(1, 2).shape, jnp.float32), numbered
    )
    return head.summed(of_rows, of_slabs, hidden, weights)


def pointwise_loss(
    hidden: Float[Array, "R S D"],
    weights: Float[Array, "V D"],
    targets: Int[Array, "R S"],
    fields: PyTree,
    pointwise: Pointwise,
    head: Head,
) -> tuple[Float[Array, ""], Float[Array, "R S"], Float[Array, "R S"]]:
    """Return the sum of a per-token loss, and the results of `token_logprobs`.

        loss = sum pointwise(logprobs, entropy, fields)

    Its derivative is known as soon as a token's logits are.  Where `chunk_vocab` lets a
    tile have all of the device's vocabulary, these are computed once: three products
    with the head instead of the four of `token_logprobs`, as in Liger kernel,
    https://arxiv.org/abs/2410.10989, section 3.2.

    Args:
        hidden: final hidden states, after the last norm.
        weights: the head.
        targets: token ids whose log-probabilities are computed.
        fields: arrays [R, S] for `pointwise`; they get no gradient.
        pointwise: a token's term of the loss, from its own entries alone.
        head: how logits are computed.

    Returns:
        The loss; log-probabilities and entropies, which have no gradient here.
    """
    parts = 1 if head.mesh is None else head.mesh.shape["tensor"]
    if weights.shape[0] <= head.chunk_vocab * parts:
        return _pointwise_loss(hidden, weights, targets, fields, pointwise, head)
    found: Any = token_logprobs(hidden, weights, targets, head)
    logprobs, entropy = found
    return pointwise(logprobs, entropy, fields).sum(), logprobs, entropy


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _pointwise_loss(
    hidden: Array,
    weights: Array,
    targets: Array,
    fields: PyTree,
    pointwise: Pointwise,
    head: Head,
) -> tuple[Array, Array, Array]:
    (logprobs, entropy), _ = _forward(hidden, weights, targets, head)
    return pointwise(logprobs, entropy, fields).sum(), logprobs, entropy


def _pointwise_forward(
    hidden: Array,
    weights: Array,
    targets: Array,
    fields: PyTree,
    pointwise: Pointwise,
    head: Head,
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
    losses, logprobs, entropy, *gradients = over_mesh(
        head.mesh,
        functools.partial(_pointwise_tiles, head, pointwise),
        in_specs=(HIDDEN, TABLE, TOKENS, jax.tree.map(lambda _: TOKENS, fields)),
        out_specs=(TOKENS, TOKENS, TOKENS, HIDDEN, TABLE),
    )(hidden, weights, targets, fields)
    return (losses.sum(), logprobs, entropy), tuple(gradients)


def _pointwise_backward(
    pointwise: Pointwise,
    head: Head,
    gradients: tuple[Array, Array],
    cotangents: tuple[Array, Array, Array],
) -> tuple[Array | None, ...]:
    of_hidden, of_weights = (
        (each * cotangents[0]).astype(each.dtype) for each in gradients
    )
    return of_hidden, of_weights, None, None


_pointwise_loss.defvjp(_pointwise_forward, _pointwise_backward)


def _pointwise_tiles(
    head: Head,
    pointwise: Pointwise,
    hidden: Array,
    weights: Array,
    targets: Array,
    fields: PyTree,
) -> tuple[Array, ...]:
    """Losses, log-probabilities, entropies of this device's tokens; two gradients."""
    slab = head.gather(weights, hidden.dtype)
    columns = jax.lax.optimization_barrier(slab.T)
    places = jnp.arange(slab.shape[0])[:, None] + head.first_id(weights)
    chunk = largest_divisor(targets.size, head.chunk_tokens)
    product, dtype = head.gradient_product(), hidden.dtype

    def over_vocab(x: Array) -> Array:
        x = x.sum(axis=0)
        return x if head.mesh is None else jax.lax.psum(x, "tensor")

    # Tiles are [v, c] here, and sums over tiles [D, c]: XLA's CPU backend transposes
    # left operands that are contracted over their rows.
    def one(of_slab: Array, each: tuple[Any, ...]) -> tuple[Array, tuple[Array, ...]]:
        hidden, ids, fields = each
        logits = head.logits(slab, hidden)
        best = logits.max(axis=0)
        if head.mesh is not None:
            best = jax.lax.pmax(best, "tensor")
        below = logits - best  # log Z may be too large to hold the log of the total
        shares = jnp.exp(below)
        total = over_vocab(shares)
        log_total = jnp.log(total)
        entropy = log_total - over_vocab(shares * below) / total
        logprobs = over_vocab(jnp.where(ids == places, below, 0.0)) - log_total
        losses, pull = jax.vjp(
            lambda logprobs, entropy: pointwise(logprobs, entropy, fields),
            logprobs,
            entropy,
        )
        of_logprob, of_entropy = pull(jnp.ones_like(losses))
        slope = (of_logprob + of_entropy * (below - log_total + entropy)) / total
        chosen = jnp.where(ids == places, of_logprob, 0.0)
        of_logits = head.of_product(chosen - shares * slope, logits, dtype)
        of_rows = product("dv,vc->dc", columns, of_logits)
        of_slab = of_slab + product("vc,cd->vd", of_logits, hidden)
        return of_slab, (losses, logprobs, entropy, of_rows)

    rows = jax.tree.map(
        lambda x: x.reshape(-1, chunk, *x.shape[2:]), (hidden, targets, fields)
    )
    of_slab, (*found, of_rows) = jax.lax.scan(one, jnp.zeros(slab.shape), rows)
    return (
        *(x.reshape(targets.shape) for x in found),
        *head.summed(of_rows, head.scatter(of_slab), hidden, weights),
    )
