"""Groups into padded batches, and rollouts into the rows that the device reads.

All of it is NumPy on the host.  How rollouts share rows never changes the gradient:
weights are given, and every segment sees itself alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from scalerl_jax.model.attention import MAX_SEGMENTS
from scalerl_jax.types import Group, PackedBatch, RolloutBatch


def stack(groups: Sequence[Group], *, max_completion_tokens: int) -> RolloutBatch:
    """Groups of equal size, padded to one batch; row n * G + g is rollout g of group n.

    T is always `max_completion_tokens`, so that the shapes never change.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    prompts = [group.prompt.tokens for group in groups for _ in group.rollouts]
    longest_prompt = max(len(prompt) for prompt in prompts)

    def padded(rows: list[np.ndarray], width: int) -> np.ndarray:
        out = np.zeros((len(rows), width), rows[0].dtype)
        for place, row in zip(out, rows, strict=True):
            place[: len(row)] = row
        return out

    return RolloutBatch(
        prompt_tokens=padded(prompts, longest_prompt),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        completion_lengths=np.array(
            [len(rollout.completion_tokens) for rollout in rollouts], np.int32
        ),
        rewards=np.array([rollout.reward for rollout in rollouts], np.float32),
        cut_off=np.array([rollout.cut_off for rollout in rollouts]),
        passed=np.array([rollout.passed for rollout in rollouts]),
        judged=np.array([rollout.judged for rollout in rollouts]),
        **{
            name: padded(
                [getattr(rollout, name) for rollout in rollouts], max_completion_tokens
            )
            for name in (
                "completion_tokens",
                "completion_mask",
                "behavior_logprobs",
                "policy_versions",
            )
        },
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """A prompt and its completion, with what each completion token counts for."""

    tokens: np.ndarray  # int32 [P + T]
    prompt_length: int  # P
    weights: np.ndarray  # float32 [T]
    mask: np.ndarray  # bool [T]
    behavior_logprobs: np.ndarray  # float32 [T], nats
    staleness: np.ndarray  # int32 [T], learner's version - token's version
    advantage: float
    # Where the objective asks for them: what scales its regularisers, and its place in
    # the batch.
    regularization: float | None = None
    rollout: int | None = None
    experts: np.ndarray | None = None  # to replay, of each position; `types.Rollout`'s

    @property
    def row_length(self) -> int:
        """Positions it takes in a row: its last token predicts nothing."""
        return len(self.tokens) - 1

    def write(self, out: dict[str, np.ndarray], where: Any, *, number: int) -> None:
        """Write what belongs to its predictions into the arrays of `lay_out`.

        `number` tells it from the other sequences of its row, from 1.
        """
        out["sequence_ids"][where] = number
        out["targets"][where] = self.tokens[self.prompt_length :]
        out["weights"][where] = self.weights
        out["mask"][where] = self.mask
        out["behavior_logprobs"][where] = self.behavior_logprobs
        out["staleness"][where] = self.staleness
        out["advantages"][where] = self.advantage
        for name in _OPTIONAL.keys() & out.keys():
            out[name][where] = getattr(self, name)


# Fields of a sequence that a batch has if its sequences do; and what padding holds.
_OPTIONAL = {"regularization": np.float32(0.0), "rollout": np.int32(-1)}


def optional_fields(sequences: Sequence[TrainSequence]) -> tuple[str, ...]:
    """Return the fields that the first of the sequences has, and so all of them."""
    return tuple(
        name
        for name in _OPTIONAL
        if sequences and getattr(sequences[0], name) is not None
    )


def lay_out(
    shape: tuple[int, ...], optional: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Empty arrays for what belongs to a prediction, by field of `PackedBatch`."""
    floats = ("weights", "advantages", "behavior_logprobs")
    integers = ("targets", "staleness", "sequence_ids")
    out: dict[str, Any] = {name: np.zeros(shape, np.float32) for name in floats}
    out |= {name: np.zeros(shape, np.int32) for name in integers}
    out["mask"] = np.zeros(shape, bool)
    return out | {name: np.full(shape, _OPTIONAL[name]) for name in optional}


def no_experts(
    sequences: Sequence[TrainSequence], shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Nothing to replay at any position, if the first of the sequences has something.

    All of them then have it, of one dtype, and for as many layers and experts.
    """
    if not sequences or (first := sequences[0].experts) is None:
        return {}
    of_token: tuple[int, ...] = first.shape[1:]
    none = np.iinfo(first.dtype).max
    return {"experts": np.full((*shape, *of_token), none, first.dtype)}


def train_sequences(
    batch: RolloutBatch,
    *,
    advantages: np.ndarray,
    weights: np.ndarray,
    learner_version: int,
    regularization: np.ndarray | None = None,
    rollouts: np.ndarray | None = None,
    experts: Sequence[np.ndarray] | None = None,
) -> list[TrainSequence]:
    """The rollouts of a batch that carry any weight.

    Args:
        batch: B rollouts.
        advantages: float [B].
        weights: float [B, T], zero on what is not trained on.
        learner_version: version of the params that the step starts from.
        regularization: float [B], what scales the regularisers of each.
        rollouts: those to take, with any weight or none; their places are kept.
        experts: what each rollout has of them, where they are replayed.
    """
    rows = np.flatnonzero(weights.any(axis=1)) if rollouts is None else rollouts
    sequences = []
    for row in rows:
        prompt = batch.prompt_tokens[row, : batch.prompt_lengths[row]]
        length = batch.completion_lengths[row]
        sequences.append(
            TrainSequence(
                tokens=np.concatenate([prompt, batch.completion_tokens[row, :length]]),
                prompt_length=len(prompt),
                weights=weights[row, :length],
                mask=batch.completion_mask[row, :length] & (weights[row, :length] > 0),
                behavior_logprobs=batch.behavior_logprobs[row, :length],
                staleness=learner_version - batch.policy_versions[row, :length],
                advantage=float(advantages[row]),
                regularization=None
                if regularization is None
                else float(regularization[row]),
                rollout=None if rollouts is None else int(row),
                experts=None if experts is None else experts[int(row)],
            )
        )
    return sequences


def pack(
    sequences: Sequence[TrainSequence],
    *,
    row_tokens: int,
    rows_per_microbatch: int,
    packing: bool = True,
) -> PackedBatch:
    """Sequences laid end to end in rows, the rows in as few microbatches [M, R, S].

    Without `packing` each sequence has a row of its own.

    Raises:
        ValueError: a sequence is longer than a row.
    """
    rows = _assign_rows(sequences, row_tokens, packing=packing)
    filled = -(-len(rows) // rows_per_microbatch)
    shape = (filled * rows_per_microbatch, row_tokens)
    integers = ("tokens", "segment_ids", "positions")
    out = lay_out(shape, optional_fields(sequences))
    out |= {name: np.zeros(shape, np.int32) for name in integers}
    out |= no_experts(sequences, shape)
    for row, members in enumerate(rows):
        start = 0
        for segment, sequence in enumerate(members, 1):
            _place(out, row, start, segment, sequence)
            start += sequence.row_length
    arrays: dict[str, Any] = {
        name: array.reshape(filled, rows_per_microbatch, *array.shape[1:])
        for name, array in out.items()
    }
    return PackedBatch(**arrays)


def computed_tokens(batch: PackedBatch) -> int:
    """Tokens that pass through the layers, padding left out."""
    if batch.sharing is None:
        return int((batch.segment_ids > 0).sum())
    return int((batch.sharing.place >= 0).sum())


def abstract_microbatch(*, row_tokens: int, rows_per_microbatch: int) -> PackedBatch:
    """Shapes and dtypes of a microbatch [R, S] that `pack` makes."""
    empty = pack([], row_tokens=row_tokens, rows_per_microbatch=rows_per_microbatch)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), empty
    )


def _assign_rows(
    sequences: Sequence[TrainSequence], row_tokens: int, *, packing: bool
) -> list[list[TrainSequence]]:
    """Return the sequences of each row."""
    lengths = [sequence.row_length for sequence in sequences]
    for length in lengths:
        if length > row_tokens:
            raise ValueError(
                f"a rollout of {length + 1} tokens does not fit in batch.row_tokens = "
                f"{row_tokens}; raise it"
            )
    rows = first_fit(lengths, row_tokens, packing=packing)
    return [[sequences[number] for number in row] for row in rows]


def first_fit(
    lengths: Sequence[int], row_tokens: int, *, packing: bool
) -> list[list[int]]:
    """Return the sequences of each row by their numbers, which are places in `lengths`.

    First fit, longest first: within 11/9 of the fewest rows.  No row gets more
    segments than an attention kernel can be told of.
    """
    rows: list[list[int]] = []
    space: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length = lengths[number]
        fits = (
            row
            for row, left in enumerate(space)
            if left >= length and len(rows[row]) < MAX_SEGMENTS
        )
        row = next(fits, None) if packing else None
        if row is None:
            rows.append([number])
            space.append(row_tokens - length)
        else:
            rows[row].append(number)
            space[row] -= length
    return rows


def _place(
    out: dict[str, np.ndarray],
    row: int,
    start: int,
    segment: int,
    sequence: TrainSequence,
) -> None:
    """Write one sequence into its row; a prediction stands where it is made."""
    end = start + sequence.row_length
    out["tokens"][row, start:end] = sequence.tokens[:-1]
    out["segment_ids"][row, start:end] = segment
    out["positions"][row, start:end] = np.arange(sequence.row_length)
    if sequence.experts is not None:
        out["experts"][row, start:end] = sequence.experts
    predictions = slice(start + sequence.prompt_length - 1, end)
    sequence.write(out, (row, predictions), number=segment)
