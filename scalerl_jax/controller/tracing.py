"""A printout of one rollout at each stage of the run, for `debug.trace_prompt`.

It shows log-probabilities of sampler and learner side by side, the best way to find
ones that are shifted by a token.  The numbers come from the run's own records; the
learner computes the rollout's part of the step once more, without a step.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from scalerl_jax.batching.assembly import Batch
from scalerl_jax.batching.packing import TrainSequence, pack
from scalerl_jax.batching.window import Window
from scalerl_jax.contract import Learner, State
from scalerl_jax.types import PackedBatch, Rollout

_SHOWN = 12  # tokens in the table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracer:
    """The printer of a prompt's first rollout at each stage of the run."""

    prompt_id: int
    learner: Learner
    decode: Callable[[list[int]], str]
    row_tokens: int
    rows_per_microbatch: int

    def __call__(self, window: Window, state: State) -> list[str]:
        """Return a text for each of the prompt's groups in a window.

        `state` is the train state before the window's first step; the window is
        completed.
        """
        return [
            self._one(batch, number, state, version=window.version, step=step)
            for step, batch in enumerate(window.batches, start=window.version + 1)
            for number, group in enumerate(batch.groups)
            if group.prompt.prompt_id == self.prompt_id
        ]

    def _one(
        self, batch: Batch, number: int, state: State, *, version: int, step: int
    ) -> str:
        """Return the text of the first rollout of a batch's group."""
        group = batch.groups[number]
        rollout, prompt = group.rollouts[0], group.prompt
        versions = rollout.policy_versions
        oldest, finished = group.oldest_version, group.finished_version
        lines = [
            f"prompt {prompt.prompt_id}, rollout 1 of {len(group.rollouts)}, in step "
            f"{step}",
            f"  prompt      {len(prompt.tokens)} tokens: {prompt.text!r}",
            f"  order       ticket {group.ticket}, epoch {prompt.epoch}",
            f"  completion  {len(rollout.completion_tokens)} tokens: "
            f"{self.decode(rollout.completion_tokens.tolist())!r}",
            *_turns(rollout),
            f"  verdict     {rollout.status}, reward {rollout.reward:g}; pass rate of "
            f"the group {group.pass_rate:.3f}",
            f"  versions    sampled with {versions.min()} to {versions.max()}, used "
            f"with {version}: staleness {version - oldest} = "
            f"{finished - oldest} in flight + {version - finished} queued",
        ]
        place = number * len(group.rollouts)
        packed = [] if batch.packed is None else np.unique(batch.rollout).tolist()
        if place not in packed:
            return "\n".join([*lines, "  batch       filtered: it has no weight"])
        # Those that are packed, in their order; -1 stands for padding.
        sequence = batch.sequences[packed.index(place) - packed.count(-1)]
        alone = _alone(batch, place)
        lines.append(
            f"  batch       advantage {alone.advantages[alone.mask].mean():+.4f}, "
            f"weight {alone.weights.sum():.3e}, {alone.mask.sum()} tokens trained on"
        )
        return "\n".join(lines + self._loss(sequence, alone, state))

    def _loss(
        self, sequence: TrainSequence, alone: PackedBatch, state: State
    ) -> list[str]:
        packed = pack(
            [sequence],
            row_tokens=self.row_tokens,
            rows_per_microbatch=self.rows_per_microbatch,
        ).batch
        own = np.asarray(packed.sequence_ids) > 0
        trained = self.learner.score(state, packed)[own]
        sampled = sequence.behavior_logprobs
        ratio = np.exp((trained - sampled)[sequence.mask].astype(np.float64))
        found = self.learner.examine(state, alone)
        lines = [
            f"  ratio       min {ratio.min():.4f}, mean {ratio.mean():.4f}, max "
            f"{ratio.max():.4f}",
            f"  loss        {found['loss']:+.4e}, ratio at its bound in "
            f"{found['ratio/capped_share']:.1%} of its tokens, norm of its own "
            f"gradient {found['grad_norm']:.3e}",
            "  token       id         sampler    learner    difference",
        ]
        tokens = sequence.tokens[sequence.prompt_length :]
        for place in range(min(len(tokens), _SHOWN)):
            text = repr(self.decode([int(tokens[place])]))
            forced = "" if sequence.mask[place] else "  not trained on"
            lines.append(
                f"  {text[:11]:<11} {tokens[place]:<8} {sampled[place]:+10.5f} "
                f"{trained[place]:+10.5f} {trained[place] - sampled[place]:+11.1e}"
                f"{forced}"
            )
        if len(tokens) > _SHOWN:
            lines.append(f"  ... and {len(tokens) - _SHOWN} tokens more")
        return lines


def _alone(batch: Batch, rollout: int) -> PackedBatch:
    """Return the microbatch of a rollout, with weight 0 for all other rollouts."""
    assert batch.packed is not None and batch.rewards is not None, "it is packed"
    own = batch.rewards.rollout == rollout
    here = slice(first := int(own.any(axis=(1, 2)).argmax()), first + 1)
    found, own = jax.tree.map(lambda leaf: leaf[here], (batch.packed, own))
    return dataclasses.replace(
        found, weights=np.where(own, found.weights, 0.0), mask=found.mask & own
    )


def _turns(rollout: Rollout) -> list[str]:
    """Return a line with the turns of an episode; of a single turn, no line."""
    parts = [
        f"{turn.start} to {turn.end} {'sampled' if turn.sampled else 'observed'}"
        + ("" if turn.reward is None else f" (reward {turn.reward:g})")
        for turn in rollout.turns
    ]
    return [f"  turns       {', '.join(parts)}"] if parts else []
