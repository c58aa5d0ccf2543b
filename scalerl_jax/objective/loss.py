"""The loss of a batch per token, which the train step minimises, and its metrics."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from scalerl_jax.algo import diagnostics
from scalerl_jax.algo.losses import TokenLoss
from scalerl_jax.objective.scores import LOGPROBS
from scalerl_jax.types import PackedBatch, Tokens

Scalars = dict[str, Float[Array, ""]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss of a token, and its metrics; static."""

    token_loss: TokenLoss  # with its regularisers
    elementwise: bool = True  # a token's loss depends on that token alone
    max_importance_ratio: float = float("inf")  # ratios above it are counted
    # Metric name -> per-token values, averaged over trained tokens.
    measures: Mapping[str, TokenLoss] = dataclasses.field(default_factory=dict)

    def weighted(
        self, logprobs: Array, entropy: Array, batch: PackedBatch
    ) -> Float[Array, "..."]:
        """Return each token's loss times its weight; zero where masked."""
        losses = self.token_loss(tokens_of(batch, logprobs, entropy))
        return batch.weights * jnp.where(batch.mask, losses, 0.0)

    def measured(
        self, logprobs: Array, entropy: Array, batch: PackedBatch
    ) -> tuple[Scalars, Scalars]:
        """Return sums and maxima over a microbatch [R, S], for `summarize`."""
        tokens = jax.lax.stop_gradient(tokens_of(batch, logprobs, entropy))
        sums, maxima = diagnostics.token_statistics(
            tokens.logprobs,
            tokens.behavior_logprobs,
            tokens.entropy,
            batch.staleness,
            tokens.mask,
            max_importance_ratio=self.max_importance_ratio,
        )
        measured = {
            name: jnp.where(tokens.mask, measure(tokens), 0.0).sum()
            for name, measure in self.measures.items()
        }
        return sums | measured, maxima


def summarize(sums: Scalars, maxima: Scalars) -> Scalars:
    """Return metrics by name from the sums and maxima of the whole batch."""
    tokens = jnp.maximum(sums["tokens"], 1.0)
    measured = sorted(sums.keys() - diagnostics.SUMS)
    means = {name: sums[name] / tokens for name in measured}
    return diagnostics.token_summary(sums, maxima) | means


def tokens_of(batch: PackedBatch, logprobs: Array, entropy: Array) -> Tokens:
    """Return the inputs of a loss; every entry is finite, also where masked."""
    own = jax.lax.stop_gradient(logprobs)
    # Masked before exp: a masked token has ratio 1, and cannot make a NaN.
    return Tokens(
        logprobs=logprobs,
        entropy=entropy,
        behavior_logprobs=jnp.where(batch.mask, batch.behavior_logprobs, own),
        advantages=jnp.where(batch.mask, batch.advantages, 0.0),
        mask=batch.mask,
        sequence_ids=batch.sequence_ids,
        scores={
            name: jnp.where(batch.mask, values, own if name in LOGPROBS else 0.0)
            for name, values in batch.scores.items()
        },
    )
