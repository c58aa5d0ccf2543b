"""What scores of a window's tokens do to its rewards, on the host."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from scalerl_jax.types import PackedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class KlPenalty:
    """The KL penalty of a rollout, subtracted from its reward.

        reward[b] -= coefficient * regularization[b] * sum over its tokens t of
                     estimator(behavior_logprob[t], reference_logprob[t])

    The KL is that of the behavior policy, whose estimate from its own tokens is
    unbiased.  https://arxiv.org/abs/2203.02155, equation 2.
    """

    estimator: Callable[[Array, Array], Array]
    coefficient: float

    def of_rollouts(
        self, batch: PackedBatch, num_rollouts: int
    ) -> Float[np.ndarray, " B"]:
        """Return the penalty that is subtracted from each rollout's reward."""
        assert batch.rollout is not None
        mask, penalties = batch.mask, self.of_tokens(batch)
        return np.bincount(
            batch.rollout[mask], weights=penalties[mask], minlength=num_rollouts
        )

    def of_tokens(self, batch: PackedBatch) -> Float[np.ndarray, "M R S"]:
        """Return the penalty of each token; 0 on tokens that were not sampled."""
        mask = batch.mask
        logprobs = (batch.behavior_logprobs[mask], batch.scores["reference"][mask])
        kl = np.asarray(self.estimator(*map(jnp.asarray, logprobs)))
        kl = self.coefficient * kl
        if "regularization" in batch.scores:
            kl = kl * batch.scores["regularization"][mask]
        penalties = np.zeros(mask.shape, np.float32)
        penalties[mask] = kl
        return penalties
