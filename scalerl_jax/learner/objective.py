"""The loss that a train step minimises, token by token, and metrics of its tokens."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from scalerl_jax.algo import diagnostics
from scalerl_jax.algo.losses import TokenLoss
from scalerl_jax.types import PackedBatch, Tokens

Scalars = dict[str, Float[Array, ""]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss of a token with its regularisers; static.

        token_loss + regularization * sum of the regularizers

    `regularization` is the token's own factor, 1 where the batch has none.
    """

    token_loss: TokenLoss
    # Whether the loss of a token is a function of that token alone.
    elementwise: bool = True
    regularizers: Sequence[TokenLoss] = ()
    max_importance_ratio: float = float("inf")  # ratios above it are counted
    # By metric, its name with a slash: averaged over the tokens that are trained on.
    measures: Mapping[str, TokenLoss] = dataclasses.field(default_factory=dict)

    def __call__(self, tokens: Tokens) -> Float[Array, "..."]:
        """The loss of each token."""
        loss = self.token_loss(tokens)
        for regularizer in self.regularizers:
            value = regularizer(tokens)
            if tokens.regularization is not None:
                value = tokens.regularization * value
            loss += value
        return loss

    def weighted(
        self, logprobs: Array, entropy: Array, batch: PackedBatch
    ) -> Float[Array, "..."]:
        """Loss of each token times its weight; zero where it is masked."""
        losses = self(tokens_of(batch, logprobs, entropy))
        return batch.weights * jnp.where(batch.mask, losses, 0.0)

    def measured(
        self, logprobs: Array, entropy: Array, batch: PackedBatch
    ) -> tuple[Scalars, Scalars]:
        """Sums and maxima over a microbatch [R, S], for `summarize`."""
        tokens = jax.lax.stop_gradient(tokens_of(batch, logprobs, entropy))
        ratios = (tokens.logprobs, tokens.behavior_logprobs)
        sums = diagnostics.token_sums(
            *ratios,
            tokens.entropy,
            batch.staleness,
            tokens.mask,
            max_importance_ratio=self.max_importance_ratio,
        )
        sums |= {
            name: jnp.where(tokens.mask, measure(tokens), 0.0).sum()
            for name, measure in self.measures.items()
        }
        return sums, diagnostics.token_maxima(*ratios, batch.staleness, tokens.mask)


def summarize(sums: Scalars, maxima: Scalars) -> Scalars:
    """Metrics by name, from the sums and maxima of the whole batch."""
    tokens = jnp.maximum(sums["tokens"], 1.0)
    means = {name: value / tokens for name, value in sums.items() if "/" in name}
    return diagnostics.token_summary(sums, maxima) | means


def tokens_of(batch: PackedBatch, logprobs: Array, entropy: Array) -> Tokens:
    """Make the fields that a loss reads; every entry is finite, where masked too."""
    own = jax.lax.stop_gradient(logprobs)

    def known(values: Array | None, masked: Array | float) -> Any:
        return None if values is None else jnp.where(batch.mask, values, masked)

    # Before exp: a masked token has ratio 1, and can never make a NaN.
    return Tokens(
        logprobs=logprobs,
        entropy=entropy,
        behavior_logprobs=known(batch.behavior_logprobs, own),
        advantages=known(batch.advantages, 0.0),
        mask=batch.mask,
        sequence_ids=batch.sequence_ids,
        proximal_logprobs=known(batch.proximal_logprobs, own),
        reference_logprobs=known(batch.reference_logprobs, own),
        regularization=known(batch.regularization, 0.0),
    )
