"""Assembly of N groups into the batch of one optimizer step, and its metrics.

Filters, advantages and token weights are computed over the whole batch, before it is
cut into microbatches.

A window is a set of groups taken together and cut into batches of N.  Its optimizer
steps go epoch by epoch, as in PPO: each epoch covers all batches of the window, the
first epoch in ticket order, a later one in an order drawn from (seed, version at the
start of the window, epoch).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from scalerl_jax.algo.advantages import (
    RunningStatistics,
    has_reward_variance,
    normalize_by_running,
)
from scalerl_jax.batching.packing import (
    TrainSequence,
    computed_tokens,
    train_sequences,
)
from scalerl_jax.batching.replay import Replay
from scalerl_jax.environments.verdict import figures_of_parts, lacks_verdict
from scalerl_jax.types import Group, PackedBatch, Rollout

# Statuses of rollouts that were judged neither right nor wrong.
_NO_VERDICTS = (
    "no_answer",
    "unparsable",
    "too_costly",
    "verifier_timeout",
    "verifier_error",
    "bad_reward",
)
_ORDER = 4  # tag of this random draw; `data` uses other numbers

# rewards [B], judged [B], kept [B] -> advantages [B], zero where not kept
Advantages = Callable[[Array, Array, Array], Array]
# mask [B, T] -> weights [B, T] that sum to 1
Weigh = Callable[[Array], Array]
# rewards [B], lengths [B], passed [B] -> rewards [B]
ShapeRewards = Callable[[Array, Array, Array], Array]
# passed [B], judged [B] -> scores [B] of the rollouts
OfVerdicts = Callable[[Array, Array], Array]
# sequences -> packed batch: a partial `packing.pack` or `stream_packing.pack_shared`
Pack = Callable[[Sequence[TrainSequence]], PackedBatch]


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
    packed: PackedBatch | None  # None where no rollout has a gradient
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
    """Makes batches of groups by the objective's functions, and packs them."""

    # None: rewards stand in for advantages until the window's annotation.
    advantages: Advantages | None
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

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint, as JSON values."""
        return self.running.state() if self.running else {}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from what `state` gave."""
        if self.running:
            self.running.restore(state)

    def __call__(self, groups: Sequence[Group], *, learner_version: int) -> Batch:
        """Return the packed batch of N groups for the step from `learner_version`."""
        sequences = self._sequences(groups, learner_version=learner_version)
        packed = self.pack(sequences) if sequences else None
        lengths = np.array([sequence.row_length for sequence in sequences])
        trained = sum(len(sequence.weights) for sequence in sequences)
        context = (lengths * (lengths + 1)).sum() / max(lengths.sum(), 1) / 2
        return Batch(
            groups=groups,
            packed=packed,
            sequences=sequences,
            train_tokens=sum(int(sequence.mask.sum()) for sequence in sequences),
            row_tokens=0 if packed is None else computed_tokens(packed),
            filtered_tokens=_completion_tokens(groups) - trained,
            mean_context=float(context),
            expert_load={} if self.replay is None else self.replay.load(sequences),
        )

    def _sequences(
        self, groups: Sequence[Group], *, learner_version: int
    ) -> list[TrainSequence]:
        """Return the rollouts that carry any weight, with their advantages."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        judged = np.array([rollout.judged for rollout in rollouts])
        passed = np.array([rollout.passed for rollout in rollouts])
        rewards = np.array([rollout.reward for rollout in rollouts], np.float32)
        kept = self._kept(rollouts, rewards, judged)
        if self.shape_rewards is not None:
            lengths = [len(rollout.completion_tokens) for rollout in rollouts]
            arrays = (rewards, np.array(lengths, np.int32), passed)
            rewards = np.asarray(self.shape_rewards(*map(jnp.asarray, arrays)))
        advantages = rewards
        if self.advantages is not None:
            arrays = map(jnp.asarray, (rewards, judged, kept))
            advantages = np.asarray(self.advantages(*arrays))
        scores = {
            name: np.asarray(score(jnp.asarray(passed), jnp.asarray(judged)))
            for name, score in self.scores.items()
        }
        # T is always the longest allowed completion, so that shapes never change.
        mask = np.zeros((len(rollouts), self.max_completion_tokens), bool)
        for row in np.flatnonzero(kept):
            own = rollouts[row].completion_mask
            mask[row, : len(own)] = own
        return train_sequences(
            groups,
            advantages=advantages,
            weights=np.asarray(self.weigh(jnp.asarray(mask))),
            learner_version=learner_version,
            scores=scores,
            rollouts=None if self.advantages is not None else np.flatnonzero(kept),
            experts=None if self.replay is None else self.replay.experts(groups),
        )

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
    for status in _NO_VERDICTS:
        name = f"verifier/{status.removeprefix('verifier_')}_share"
        metrics[name] = _mean(rollout.status == status for rollout in rollouts)
    metrics["verifier/unjudged_share"] = _mean(
        lacks_verdict(rollout.status, judged=rollout.judged) for rollout in rollouts
    )
    metrics |= figures_of_parts([rollout.parts for rollout in rollouts])
    for task in sorted({group.prompt.task for group in groups}):
        metrics[f"pass_rate/{task}"] = _pass_rate(
            [group for group in groups if group.prompt.task == task]
        )
    return metrics


def _pass_rate(groups: Sequence[Group]) -> float:
    """Mean over the groups with a verdict."""
    return _mean(group.pass_rate for group in groups if group.num_judged)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One batch in one epoch: an optimizer step to make."""

    batch: Batch
    epoch: int
    last: bool  # of the window


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """The batches of a window, assembled at policy version `version`."""

    batches: Sequence[Batch]
    version: int

    def packed(self) -> list[PackedBatch]:
        """Return the packed arrays of the batches that have a gradient."""
        return [each.packed for each in self.batches if each.packed is not None]

    def annotated(self, packed: Sequence[PackedBatch]) -> "Window":
        """Return the window with other arrays in place of `packed()`."""
        rest = iter(packed)
        batches = [
            each
            if each.packed is None
            else dataclasses.replace(each, packed=next(rest))
            for each in self.batches
        ]
        return dataclasses.replace(self, batches=batches)

    def passes(self, *, epochs: int, seed: int) -> list[Pass]:
        """Return the steps in order; a batch without a gradient comes once only."""
        turns = [(0, batch) for batch in self.batches]
        useful = [batch for batch in self.batches if batch.packed is not None]
        for epoch in range(1, epochs):
            random = np.random.Generator(
                np.random.PCG64([seed, _ORDER, self.version, epoch])
            )
            turns += [(epoch, useful[at]) for at in random.permutation(len(useful))]
        return [
            Pass(batch=batch, epoch=epoch, last=number == len(turns))
            for number, (epoch, batch) in enumerate(turns, start=1)
        ]

    def at(self, version: int, batch: Batch) -> Batch:
        """Return a batch with its staleness counted for the step from `version`."""
        packed, age = batch.packed, version - self.version
        if packed is None or not age:
            return batch
        aged = dataclasses.replace(packed, staleness=packed.staleness + age)
        return dataclasses.replace(batch, packed=aged)


def open_window(
    groups: Sequence[Group],
    *,
    num_prompts: int,
    num_batches: int,
    version: int,
    assemble: Callable[..., Batch],
) -> Window:
    """Return the window of `groups`, which are in ticket order.

    `assemble` is an `Assembler` or has its signature.  If there are more groups than
    `num_batches` of `num_prompts`, the surplus are zero-variance groups that refills
    have replaced: the last such groups are taken out and noted as `refilled` of the
    batches, for which they were generated.
    """
    places = num_batches * num_prompts
    by_use = sorted(groups, key=lambda group: not group.has_reward_variance)
    kept, over = by_use[:places], by_use[places:]
    kept = sorted(kept, key=lambda group: group.ticket)
    batches = []
    for number in range(num_batches):
        chosen = kept[number * num_prompts : (number + 1) * num_prompts]
        batch = assemble(chosen, learner_version=version)
        batches.append(dataclasses.replace(batch, refilled=over[number::num_batches]))
    return Window(batches=batches, version=version)
