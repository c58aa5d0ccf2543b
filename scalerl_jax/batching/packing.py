"""Rollouts into the rows that the device reads.

All of it is NumPy on the host.  How rollouts share rows never changes the gradient:
weights are given, and every segment sees itself alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from scalerl_jax.model.attention import MAX_SEGMENTS
from scalerl_jax.types import Group, PackedBatch


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
    # If the objective asks for them: the factor of its regularisers, and the place in
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


def lay_out(
    shape: tuple[int, ...], sequences: Sequence[TrainSequence]
) -> dict[str, np.ndarray]:
    """Empty arrays for what belongs to a prediction, by field of `PackedBatch`.

    Optional fields are those that the first of the sequences has, and so all of them.
    """
    floats = ("weights", "advantages", "behavior_logprobs")
    integers = ("targets", "staleness", "sequence_ids")
    out: dict[str, Any] = {name: np.zeros(shape, np.float32) for name in floats}
    out |= {name: np.zeros(shape, np.int32) for name in integers}
    out["mask"] = np.zeros(shape, bool)
    for name, padding in _OPTIONAL.items():
        if sequences and getattr(sequences[0], name) is not None:
            out[name] = np.full(shape, padding)
    return out


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
    groups: Sequence[Group],
    *,
    advantages: np.ndarray,
    weights: np.ndarray,
    learner_version: int,
    regularization: np.ndarray | None = None,
    rollouts: np.ndarray | None = None,
    experts: Sequence[np.ndarray] | None = None,
) -> list[TrainSequence]:
    """The rollouts of groups that carry any weight.

    Args:
        groups: of B rollouts together.
        advantages: float [B].
        weights: float [B, T], zero on what is not trained on.
        learner_version: version of the params that the step starts from.
        regularization: float [B], what scales the regularisers of each.
        rollouts: those to take, with any weight or none; their places are kept.
        experts: what each rollout has of them, where they are replayed.
    """
    known = [(group.prompt.tokens, each) for group in groups for each in group.rollouts]
    rows = np.flatnonzero(weights.any(axis=1)) if rollouts is None else rollouts
    sequences = []
    for row in rows.tolist():
        prompt, rollout = known[row]
        own = weights[row, : len(rollout.completion_tokens)]
        sequences.append(
            TrainSequence(
                tokens=np.concatenate([prompt, rollout.completion_tokens]),
                prompt_length=len(prompt),
                weights=own,
                mask=rollout.completion_mask & (own > 0),
                behavior_logprobs=rollout.behavior_logprobs,
                staleness=learner_version - rollout.policy_versions,
                advantage=float(advantages[row]),
                regularization=None
                if regularization is None
                else float(regularization[row]),
                rollout=None if rollouts is None else row,
                experts=None if experts is None else experts[row],
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
    lengths = [sequence.row_length for sequence in sequences]
    if (longest := max(lengths, default=0)) > row_tokens:
        raise ValueError(
            f"a rollout of {longest + 1} tokens does not fit in batch.row_tokens = "
            f"{row_tokens}; raise it"
        )
    rows = first_fit(lengths, row_tokens, packing=packing)
    filled = -(-len(rows) // rows_per_microbatch)
    shape = (filled * rows_per_microbatch, row_tokens)
    integers = ("tokens", "segment_ids", "positions")
    out = lay_out(shape, sequences)
    out |= {name: np.zeros(shape, np.int32) for name in integers}
    out |= no_experts(sequences, shape)
    for row, members in enumerate(rows):
        start = 0
        for segment, number in enumerate(members, 1):
            sequence, end = sequences[number], start + lengths[number]
            out["tokens"][row, start:end] = sequence.tokens[:-1]
            out["segment_ids"][row, start:end] = segment
            out["positions"][row, start:end] = np.arange(end - start)
            if sequence.experts is not None:
                out["experts"][row, start:end] = sequence.experts
            # A prediction stands where it is made.
            predictions = slice(start + sequence.prompt_length - 1, end)
            sequence.write(out, (row, predictions), number=segment)
            start = end
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
