"""Advantages of a packed batch, from its rewards and scores; on the host."""

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
    """The KL penalty of a rollout, subtracted from its reward.

        reward[b] -= coefficient * regularization[b] * sum over its tokens t of
                     estimator(behavior_logprob[t], reference_logprob[t])

    The KL is that of the behavior policy, whose estimate from its own tokens is
    unbiased.  https://arxiv.org/abs/2203.02155, equation 2.
    """

    estimator: Callable[[Array, Array], Array]
    coefficient: float

    def of_rollouts(
        self, batch: PackedBatch, rewards: Rewards
    ) -> Float[np.ndarray, " B"]:
        """Return the penalty of each rollout; 0 of those that the batch lacks."""
        mask, penalties = batch.mask, self.of_tokens(batch)
        return np.bincount(
            rewards.rollout[mask],
            weights=penalties[mask],
            minlength=len(rewards.rewards),
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    """Gives all tokens of a rollout one advantage: its reward beside its group's.

    Where turns have rewards of their own, what they have beside their group is added.
    """

    # rewards [B], judged [B], kept [B] -> advantages [B], 0 where not kept
    of_rewards: Callable[[Array, Array, Array], Array]
    penalty: KlPenalty | None = None  # subtracted from the rewards before

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
            scale = turns.scale(values, rewards.judged, advantages)
            on_tokens = on_tokens + rewards.on_tokens(scale) * turns.centered
        return dataclasses.replace(batch, advantages=on_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaughtAdvantages:
    """Adds what a teacher says of each sampled token to its advantage.

        advantage[t] += coefficient * (teacher_logprob[t] - behavior_logprob[t])

    With the gradient of a token's log-probability, its mean is minus the gradient of
    KL(policy || teacher) of the next token, the later ones' aside.  Agarwal et al.,
    https://arxiv.org/abs/2306.13649, with the reverse KL on the policy's own samples.
    """

    of_rewards: Advantages | None  # made before; None: the teacher is alone
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
    """Gives each sampled token its advantage over a critic's values, and a return.

    The critic spoke before the window's first step.  A completion's reward is that of
    its last sampled token.
    """

    gamma: float
    gae_lambda: float
    eps: float | None  # whitened over the sampled tokens of the batch; None: as is
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
        # Microbatch by microbatch: the shape is always the same, so one program.
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
