"""Advantages of a packed batch from its rewards and scores, computed on the host."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from scalerl_jax.algo.values import final_rewards, gae, whiten
from scalerl_jax.batching.assembly import Advantages, Rewards
from scalerl_jax.types import PackedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class KlPenalty:
    """A KL penalty that is subtracted from the reward of a rollout.

        reward[b] -= coefficient * regularization[b] * sum over its tokens t of
                     estimator(behavior_logprob[t], reference_logprob[t])

    It is the KL of the behavior policy, since its estimate from its own tokens is
    unbiased.  https://arxiv.org/abs/2203.02155, equation 2.
    """

    estimator: Callable[[Array, Array], Array]
    coefficient: float

    def of_rollouts(
        self, batch: PackedBatch, rewards: Rewards
    ) -> Float[np.ndarray, " B"]:
        """Return the penalty of each rollout; 0 for rollouts outside of the batch."""
        mask, penalties = batch.mask, self.of_tokens(batch)
        return np.bincount(
            rewards.rollout[mask],
            weights=penalties[mask],
            minlength=len(rewards.rewards),
        )

    def of_tokens(self, batch: PackedBatch) -> Float[np.ndarray, "M R S"]:
        """Return the penalty of each token; 0 for tokens that were not sampled."""
        mask = batch.mask
        pair = (batch.behavior_logprobs, batch.scores["reference"])
        rows = zip(*(np.where(mask, each, 0.0) for each in pair), strict=True)
        # Whole microbatches: each number of sampled tokens would be one more program.
        kl = np.stack([self.estimator(*map(jnp.asarray, each)) for each in rows])
        kl = self.coefficient * kl
        if "regularization" in batch.scores:
            kl = kl * batch.scores["regularization"]
        return np.where(mask, kl, 0.0).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    """One advantage for all tokens of a rollout: its reward relative to its group.

    If turns have their own rewards, each turn's advantage over its group is added.
    """

    # rewards [B], judged [B], kept [B] -> advantages [B], 0 where not kept
    of_rewards: Callable[[Array, Array, Array], Array]
    penalty: KlPenalty | None = None  # subtracted from the rewards first

    def __call__(self, batch: PackedBatch, rewards: Rewards) -> PackedBatch:
        """Return the batch [M, R, S] with its advantages."""
        values = rewards.rewards
        if self.penalty is not None:
            penalties = self.penalty.of_rollouts(batch, rewards)
            values = (values - penalties).astype(np.float32)
        arrays = map(jnp.asarray, (values, rewards.judged, rewards.kept))
        advantages = np.asarray(self.of_rewards(*arrays))
        on_tokens = rewards.on_tokens(advantages)
        if (turns := rewards.turns) is not None:
            scale = turns.scale(values, rewards.judged, rewards.kept, advantages)
            on_tokens = on_tokens + rewards.on_tokens(scale) * turns.centered
        return dataclasses.replace(batch, advantages=on_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaughtAdvantages:
    """Advantages with a teacher's log-probability ratio added at each sampled token.

        advantage[t] += coefficient * (teacher_logprob[t] - behavior_logprob[t])

    Multiplied by the gradient of the token's log-probability, its mean is minus the
    gradient of the next token's KL(policy || teacher); the KL of later tokens is left
    out.  Agarwal et al., https://arxiv.org/abs/2306.13649, with the reverse KL on the
    policy's own samples.
    """

    of_rewards: Advantages | None  # the rewards' part; None: the teacher's alone
    coefficient: float

    def __call__(self, batch: PackedBatch, rewards: Rewards) -> PackedBatch:
        """Return the batch [M, R, S] with its advantages."""
        if self.of_rewards is not None:
            batch = self.of_rewards(batch, rewards)
        better = batch.scores["teacher"] - batch.behavior_logprobs
        taught = np.where(batch.mask, np.float32(self.coefficient) * better, 0.0)
        return dataclasses.replace(batch, advantages=batch.advantages + taught)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticAdvantages:
    """Advantages over a critic's values, and returns, for each sampled token.

    The values are computed before the window's first step.  A completion's last sampled
    token has its reward.
    """

    gamma: float
    gae_lambda: float
    eps: float | None  # for whitening over the batch's sampled tokens; None: unscaled
    penalty: KlPenalty | None = None  # subtracted from each token's reward

    def __call__(self, batch: PackedBatch, rewards: Rewards) -> PackedBatch:
        """Return the batch [M, R, S] with advantages, and "returns" beside "values"."""
        values = np.asarray(batch.scores["values"])
        penalty = self.penalty
        penalties = (
            np.zeros_like(values) if penalty is None else penalty.of_tokens(batch)
        )
        on_tokens = rewards.on_tokens(rewards.rewards)
        rows = (on_tokens, penalties, values, batch.sequence_ids, batch.mask)
        # Per microbatch: the shape is always the same, so one program is compiled.
        advantages = np.stack(
            [self._of_rows(*each) for each in zip(*rows, strict=True)]
        )
        returns = advantages + values
        if self.eps is not None:
            arrays = map(jnp.asarray, (advantages, batch.mask))
            advantages = np.asarray(whiten(*arrays, eps=self.eps))
        scores = {**batch.scores, "returns": returns}
        return dataclasses.replace(batch, advantages=advantages, scores=scores)

    @functools.cached_property
    def _of_rows(self) -> Callable[..., Float[Array, "R S"]]:
        @jax.jit
        def of_rows(
            rewards: Array, penalties: Array, values: Array, ids: Array, mask: Array
        ) -> Array:
            return gae(
                final_rewards(rewards, ids, mask) - penalties,
                values,
                ids,
                mask,
                gamma=self.gamma,
                gae_lambda=self.gae_lambda,
            )

        return of_rows
