"""Assembly of N groups into the batch of one optimizer step.

    pack:        the groups become rows, each token with its weight
    score:       the learner gives each token what the objective's terms read of it
    advantages:  made of the rewards and the scores

Filters, token weights and advantages are of the whole batch, whatever its cut into
microbatches.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from scalerl_jax.algo.advantages import (
    RunningStatistics,
    has_reward_variance,
    normalize_by_running,
)
from scalerl_jax.batching.packing import (
    Packed,
    TrainSequence,
    computed_tokens,
    laid_out,
    train_sequences,
)
from scalerl_jax.batching.replay import Replay
from scalerl_jax.batching.turns import TurnRewards, turn_rewards
from scalerl_jax.types import Group, PackedBatch, Rollout, Scores, rollouts_of

# mask [B, T] -> weights [B, T] that sum to 1
Weigh = Callable[[Array], Array]
# rewards [B], lengths [B], passed [B] -> rewards [B]
ShapeRewards = Callable[[Array, Array, Array], Array]
# passed [B], judged [B] -> scores [B] of the rollouts
OfVerdicts = Callable[[Array, Array], Array]
# A partial `packing.pack` or `stream_packing.pack_shared`.
Pack = Callable[[Sequence[TrainSequence]], Packed]

# One program; each of its operations by itself would be one.
_has_reward_variance = jax.jit(has_reward_variance, static_argnames="group_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewards:
    """Rewards and verdicts of a batch's B rollouts, and where their tokens stand."""

    rewards: Float[np.ndarray, " B"]
    passed: Bool[np.ndarray, " B"]
    judged: Bool[np.ndarray, " B"]
    kept: Bool[np.ndarray, " B"]  # these enter normalisation and loss
    # The rollout n * G + g of each prediction of the packed batch; -1 where there is
    # none.
    rollout: Int[np.ndarray, "M R S"]
    turns: TurnRewards | None = None  # set if turns have rewards of their own

    def on_tokens(self, values: Float[np.ndarray, " B"]) -> Float[np.ndarray, "M R S"]:
        """Return the value of each token's rollout, of `values`; 0 on padding."""
        return laid_out(values, self.rollout)


# A batch with its scores, its rewards -> the batch with its advantages.
Advantages = Callable[[PackedBatch, Rewards], PackedBatch]


class Laid(NamedTuple):
    """Groups as a batch, before there are scores and advantages."""

    sequences: list[TrainSequence]  # the rollouts that carry weight
    packed: PackedBatch | None  # None: none does
    generated_tokens: int  # of these rollouts
    rollout: Int[np.ndarray, "M R S"]  # as in `Rewards`


class RunningNormalization:
    """Divides advantages by their spread over all batches so far.

    Each call adds its batch to the statistics, which checkpoints keep.
    """

    def __init__(self, *, eps: float) -> None:
        """Begin with no batch."""
        self._eps = eps
        self._statistics = RunningStatistics()

    def __call__(
        self, advantages: Float[Array, " B"], kept: Bool[Array, " B"]
    ) -> Float[Array, " B"]:
        """Return A / (spread of all A kept so far, this batch's included, + eps)."""
        scaled, self._statistics = normalize_by_running(
            advantages, kept, self._statistics, eps=self._eps
        )
        return scaled

    def state(self) -> dict[str, float]:
        """Return the statistics as JSON values that hold each float32 exactly."""
        return {name: float(each) for name, each in vars(self._statistics).items()}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from what `state` gave."""
        count, squares = state["count"], state["squares"]
        # Older checkpoints hold squares about a mean.
        squares += count * state.get("mean", 0.0) ** 2
        self._statistics = RunningStatistics(
            count=jnp.float32(count), squares=jnp.float32(squares)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """N groups to train on: as taken from the queue, and packed for the device."""

    groups: Sequence[Group]
    version: int  # of the learner, as it was packed
    # None where no rollout has a gradient; advantages are 0 until they are computed.
    packed: PackedBatch | None
    rewards: Rewards | None  # None as `packed`
    sequences: Sequence[TrainSequence]  # the packed ones
    train_tokens: int  # completion tokens with a weight
    row_tokens: int  # prompt and completion tokens computed, padding left out
    filtered_tokens: int  # generated tokens that were filtered away
    carried_tokens: int  # those of the packed rollouts; wasted if no step is applied
    # Tokens that attention reads of the whole sequences, by computed token: a shared
    # prompt is computed once, and attends to itself in each of its sequences.
    mean_context: float
    expert_load: dict[str, float] = dataclasses.field(default_factory=dict)
    refilled: Sequence[Group] = ()  # zero-variance groups replaced by refills

    @property
    def rollout(self) -> Int[np.ndarray, "M R S"]:
        """Return the rollout n * G + g of each prediction; -1 where there is none."""
        assert self.rewards is not None, "no rollout has a gradient"
        return self.rewards.rollout

    @property
    def sequence_tokens(self) -> int:
        """Tokens of whole sequences; above `row_tokens` where prompts are shared."""
        return sum(sequence.row_length for sequence in self.sequences)

    @property
    def wasted_tokens(self) -> int:
        """Tokens generated for this batch that lead to no gradient."""
        return self.filtered_tokens + _generated_tokens(rollouts_of(self.refilled))

    @property
    def num_useful(self) -> int:
        """Groups of the batch with reward variance."""
        return sum(group.has_reward_variance for group in self.groups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assembler:
    """Makes batches of groups by the objective's functions."""

    advantages: Advantages
    weigh: Weigh
    zero_variance_filter: bool
    mask_cut_off: bool
    group_size: int
    max_completion_tokens: int
    pack: Pack
    # `shape_rewards` None: rewards depend on verdicts alone.
    shape_rewards: ShapeRewards | None = None
    # By name, what the terms of the objective read of each rollout's verdict.
    scores: Mapping[str, OfVerdicts] = dataclasses.field(default_factory=dict)
    running: RunningNormalization | None = None  # set if `advantages` calls it
    replay: Replay | None = None  # set if routing is replayed
    per_turn: bool = False  # turns have rewards, and advantages of their own

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint, as JSON values."""
        return self.running.state() if self.running else {}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from what `state` gave."""
        if self.running:
            self.running.restore(state)

    def __call__(self, groups: Sequence[Group], *, learner_version: int) -> Batch:
        """Return the packed batch of N groups for the step from `learner_version`.

        `complete` gives it scores and advantages.
        """
        sequences, packed, carried, rollout = self.packed(
            groups, learner_version=learner_version
        )
        lengths = np.array([sequence.row_length for sequence in sequences])
        row_tokens = 0 if packed is None else computed_tokens(packed)
        context = (lengths * (lengths + 1)).sum() / max(row_tokens, 1) / 2
        return Batch(
            groups=groups,
            version=learner_version,
            packed=packed,
            rewards=None if packed is None else self._rewards(groups, rollout),
            sequences=sequences,
            train_tokens=sum(int(sequence.mask.sum()) for sequence in sequences),
            row_tokens=row_tokens,
            filtered_tokens=_generated_tokens(rollouts_of(groups)) - carried,
            carried_tokens=carried,
            mean_context=float(context),
            expert_load={} if self.replay is None else self.replay.load(sequences),
        )

    def packed(self, groups: Sequence[Group], *, learner_version: int) -> Laid:
        """Return the rollouts of groups that carry weight, and the batch of them."""
        rollouts = rollouts_of(groups)
        by_rollout = train_sequences(
            groups,
            weights=self._weights(rollouts, self._kept(rollouts)),
            learner_version=learner_version,
            experts=None if self.replay is None else self.replay.experts(groups),
        )
        sequences = [*by_rollout.values()]
        if not sequences:
            return Laid(sequences, None, 0, np.empty((0, 0, 0), np.int32))
        packed, places = self.pack(sequences)
        rollout = np.where(places >= 0, np.array([*by_rollout])[places], -1)
        generated = _generated_tokens([rollouts[row] for row in by_rollout])
        return Laid(sequences, packed, generated, rollout)

    def complete(self, batch: Batch, scores: Scores) -> Batch:
        """Return a packed batch with its scores, and advantages made of them.

        `scores` are the learner's; those of verdicts are added.  Batches are completed
        once, in their order: a running scale counts each.
        """
        if batch.packed is None or batch.rewards is None:
            return batch
        rewards = batch.rewards
        verdicts = jnp.asarray(rewards.passed), jnp.asarray(rewards.judged)
        of_verdicts = {
            name: rewards.on_tokens(np.asarray(score(*verdicts)))
            for name, score in self.scores.items()
        }
        packed = dataclasses.replace(batch.packed, scores={**scores, **of_verdicts})
        return dataclasses.replace(batch, packed=self.advantages(packed, rewards))

    def _rewards(self, groups: Sequence[Group], rollout: np.ndarray) -> Rewards:
        rollouts = rollouts_of(groups)
        judged = np.array([each.judged for each in rollouts])
        passed = np.array([each.passed for each in rollouts])
        turns = None
        if self.per_turn:
            turns = turn_rewards(rollouts, judged, rollout, group_size=self.group_size)
        return Rewards(
            rewards=self._shaped(rollouts, passed),
            passed=passed,
            judged=judged,
            kept=self._kept(rollouts),
            rollout=rollout,
            turns=turns,
        )

    def _weights(
        self, rollouts: Sequence[Rollout], kept: np.ndarray
    ) -> Float[np.ndarray, "B T"]:
        """Return what each token counts for; 0 on tokens that are not trained on."""
        # T is always the longest allowed completion, so that shapes never change.
        mask = np.zeros((len(rollouts), self.max_completion_tokens), bool)
        for row in np.flatnonzero(kept).tolist():
            own = rollouts[row].completion_mask
            mask[row, : len(own)] = own
        return np.asarray(self.weigh(jnp.asarray(mask)))

    def _shaped(self, rollouts: Sequence[Rollout], passed: np.ndarray) -> np.ndarray:
        """Return the rewards [B] with what the lengths of the rollouts add to them."""
        rewards = np.array([each.reward for each in rollouts], np.float32)
        if self.shape_rewards is None:
            return rewards
        lengths = [len(rollout.completion_tokens) for rollout in rollouts]
        arrays = (rewards, np.array(lengths, np.int32), passed)
        return np.asarray(self.shape_rewards(*map(jnp.asarray, arrays)))

    def _kept(self, rollouts: Sequence[Rollout]) -> Bool[np.ndarray, " B"]:
        """Mark the rollouts [B] that enter normalisation and loss.

        Only verdicts count: a length penalty gives a zero-variance group no gradient.
        """
        judged = kept = np.array([each.judged for each in rollouts])
        if self.zero_variance_filter:
            rewards = np.array([each.reward for each in rollouts], np.float32)
            varied = _has_reward_variance(rewards, judged, group_size=self.group_size)
            kept = kept & np.asarray(varied)
        if self.mask_cut_off:
            kept = kept & ~np.array([rollout.cut_off for rollout in rollouts])
        return kept


def _generated_tokens(rollouts: Sequence[Rollout]) -> int:
    return sum(rollout.generated_tokens for rollout in rollouts)
