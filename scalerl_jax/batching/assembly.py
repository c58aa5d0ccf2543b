"""Assembly of N groups into the batch of one optimizer step, and its metrics.

    pack:        the groups become rows, each token with its weight
    score:       the learner gives each token what the objective's terms read of it
    advantages:  made of the rewards and the scores

Filters, token weights and advantages are of the whole batch, whatever its cut into
microbatches.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

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
from scalerl_jax.environments.verdict import figures_of_parts, lacks_verdict
from scalerl_jax.types import Group, PackedBatch, Rollout, Scores, count_turns

# Statuses of rollouts that were judged neither right nor wrong.
_NO_VERDICTS = (
    "no_answer",
    "unparsable",
    "too_costly",
    "verifier_timeout",
    "verifier_error",
    "bad_reward",
    "bad_observation",
    "no_end",
)

# mask [B, T] -> weights [B, T] that sum to 1
Weigh = Callable[[Array], Array]
# rewards [B], lengths [B], passed [B] -> rewards [B]
ShapeRewards = Callable[[Array, Array, Array], Array]
# passed [B], judged [B] -> scores [B] of the rollouts
OfVerdicts = Callable[[Array, Array], Array]
# A partial `packing.pack` or `stream_packing.pack_shared`.
Pack = Callable[[Sequence[TrainSequence]], Packed]


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
    # None where no rollout has a gradient; advantages are 0 until they are computed.
    packed: PackedBatch | None
    rewards: Rewards | None  # None as `packed`
    sequences: Sequence[TrainSequence]  # the packed ones
    train_tokens: int  # completion tokens with a weight
    row_tokens: int  # prompt and completion tokens computed, padding left out
    filtered_tokens: int  # completion tokens that were filtered away
    mean_context: float  # tokens that a position attends to, on average
    expert_load: dict[str, float] = dataclasses.field(default_factory=dict)
    refilled: Sequence[Group] = ()  # zero-variance groups replaced by refills

    @property
    def wasted_tokens(self) -> int:
        """Completion tokens generated for this batch that lead to no gradient."""
        return self.filtered_tokens + _completion_tokens(self.refilled)

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
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        judged = np.array([rollout.judged for rollout in rollouts])
        passed = np.array([rollout.passed for rollout in rollouts])
        rewards = np.array([rollout.reward for rollout in rollouts], np.float32)
        kept = self._kept(rollouts, rewards, judged)
        by_rollout = train_sequences(
            groups,
            weights=self._weights(rollouts, kept),
            learner_version=learner_version,
            experts=None if self.replay is None else self.replay.experts(groups),
        )
        sequences, packed, of_batch = [*by_rollout.values()], None, None
        if sequences:
            packed, places = self.pack(sequences)
            rollout = np.where(places >= 0, np.array([*by_rollout])[places], -1)
            turns = None
            if self.per_turn:
                turns = turn_rewards(
                    rollouts, judged, rollout, group_size=self.group_size
                )
            of_batch = Rewards(
                rewards=self._shaped(rollouts, rewards, passed),
                passed=passed,
                judged=judged,
                kept=kept,
                rollout=rollout,
                turns=turns,
            )
        lengths = np.array([sequence.row_length for sequence in sequences])
        trained = sum(len(sequence.weights) for sequence in sequences)
        context = (lengths * (lengths + 1)).sum() / max(lengths.sum(), 1) / 2
        return Batch(
            groups=groups,
            packed=packed,
            rewards=of_batch,
            sequences=sequences,
            train_tokens=sum(int(sequence.mask.sum()) for sequence in sequences),
            row_tokens=0 if packed is None else computed_tokens(packed),
            filtered_tokens=_completion_tokens(groups) - trained,
            mean_context=float(context),
            expert_load={} if self.replay is None else self.replay.load(sequences),
        )

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

    def _shaped(
        self, rollouts: Sequence[Rollout], rewards: np.ndarray, passed: np.ndarray
    ) -> np.ndarray:
        """Return the rewards [B] with what the lengths of the rollouts add to them."""
        if self.shape_rewards is None:
            return rewards
        lengths = [len(rollout.completion_tokens) for rollout in rollouts]
        arrays = (rewards, np.array(lengths, np.int32), passed)
        return np.asarray(self.shape_rewards(*map(jnp.asarray, arrays)))

    def _kept(
        self, rollouts: Sequence[Rollout], rewards: np.ndarray, judged: np.ndarray
    ) -> np.ndarray:
        """Mark the rollouts [B] that enter normalisation and loss.

        Only verdicts count: a length penalty gives a zero-variance group no gradient.
        """
        kept = judged
        if self.zero_variance_filter:
            arrays = map(jnp.asarray, (rewards, judged))
            varied = has_reward_variance(*arrays, group_size=self.group_size)
            kept = kept & np.asarray(varied)
        if self.mask_cut_off:
            kept = kept & ~np.array([rollout.cut_off for rollout in rollouts])
        return kept


def _completion_tokens(groups: Sequence[Group]) -> int:
    return sum(
        len(each.completion_tokens) for group in groups for each in group.rollouts
    )


def group_histograms(
    groups: Sequence[Group], *, learner_version: int
) -> dict[str, np.ndarray]:
    """Return per-rollout or per-token values of a batch for histograms, by name."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    oldest = np.array([group.oldest_version for group in groups])
    return {
        "completion/tokens": np.array(
            [len(each.completion_tokens) for each in rollouts]
        ),
        "reward": np.array([each.reward for each in rollouts if each.judged]),
        "staleness": learner_version - oldest,
        "pass_rate/of_prompts": np.array(
            [group.pass_rate for group in groups if group.num_judged]
        ),
    }


def group_metrics(groups: Sequence[Group], *, learner_version: int) -> dict[str, float]:
    """Return means of rewards, lengths (tokens) and staleness, by metric name."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = np.array([len(rollout.completion_tokens) for rollout in rollouts])
    oldest = np.array([group.oldest_version for group in groups])
    finished = np.array([group.finished_version for group in groups])
    metrics = {
        "reward/mean": _mean(each.reward for each in rollouts if each.judged),
        "pass_rate/mean": _pass_rate(groups),
        "group/zero_variance_share": _mean(
            not group.has_reward_variance for group in groups
        ),
        "completion/mean_tokens": float(lengths.mean()),
        "completion/max_tokens": int(lengths.max()),
        "completion/cut_off_share": _mean(rollout.cut_off for rollout in rollouts),
        "completion/interrupted_share": _mean(
            rollout.interrupted for rollout in rollouts
        ),
        "staleness/mean": float((learner_version - oldest).mean()),
        "staleness/max": int((learner_version - oldest).max()),
        # Staleness in two parts: until the last token was sampled, and after it.
        "staleness/in_flight_mean": float((finished - oldest).mean()),
        "staleness/in_flight_max": int((finished - oldest).max()),
        "staleness/queued_mean": float((learner_version - finished).mean()),
        "staleness/queued_max": int((learner_version - finished).max()),
    }
    statuses = Counter(rollout.status for rollout in rollouts)
    for status in _NO_VERDICTS:
        name = f"verifier/{status.removeprefix('verifier_')}_share"
        metrics[name] = statuses[status] / len(rollouts)
    metrics["verifier/unjudged_share"] = _mean(
        lacks_verdict(rollout.status, judged=rollout.judged) for rollout in rollouts
    )
    if any(rollout.turns for rollout in rollouts):
        sampled = [int(rollout.completion_mask.sum()) for rollout in rollouts]
        metrics["episode/mean_turns"] = _mean(
            count_turns(rollout.turns) for rollout in rollouts
        )
        metrics["episode/sampled_share"] = sum(sampled) / int(lengths.sum())
    metrics |= figures_of_parts([rollout.parts for rollout in rollouts])
    by_task: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_task[group.prompt.task].append(group)
    for task in sorted(by_task):
        metrics[f"pass_rate/{task}"] = _pass_rate(by_task[task])
    return metrics


def _pass_rate(groups: Sequence[Group]) -> float:
    """Mean over the groups with a verdict."""
    return _mean(group.pass_rate for group in groups if group.num_judged)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else math.nan
