"""Packing of rollouts into the rows [M, R, S] that the device reads.

All of it is NumPy on the host.  How rollouts share rows never changes the gradient:
token weights are computed before, and a segment attends to itself alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int, Shaped

from scalerl_jax.batching.rooms import Rooms
from scalerl_jax.types import Group, PackedBatch, Sharing

ROW_SEGMENTS = 128  # sequences in a row, at most, where the caller has no limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """A prompt and its completion, with a weight for each completion token."""

    tokens: np.ndarray  # int32 [P + T]
    prompt_length: int  # P
    weights: np.ndarray  # float32 [T]
    mask: np.ndarray  # bool [T]
    behavior_logprobs: np.ndarray  # float32 [T], nats
    staleness: np.ndarray  # int32 [T], learner's version - token's version
    experts: np.ndarray | None = None  # to replay at each position; see `types.Rollout`

    @property
    def row_length(self) -> int:
        """Positions in a row: all tokens but the last, which predicts nothing."""
        return len(self.tokens) - 1

    def write(
        self, out: dict[str, np.ndarray], where: Any, *, number: int, place: int
    ) -> None:
        """Write the fields of this sequence's predictions into arrays of `lay_out`.

        Args:
            out: the arrays.
            where: index of the sequence's positions in them.
            number: its id in its row, from 1.
            place: its place among the sequences that are packed, from 0.
        """
        out["sequence"][where] = place
        out["sequence_ids"][where] = number
        out["targets"][where] = self.tokens[self.prompt_length :]
        out["weights"][where] = self.weights
        out["mask"][where] = self.mask
        out["behavior_logprobs"][where] = self.behavior_logprobs
        out["staleness"][where] = self.staleness


class Packed(NamedTuple):
    """A batch of sequences, and the sequence of each of its predictions."""

    batch: PackedBatch  # its advantages are 0, and it has no scores
    # Place among the sequences that were packed; -1 where no token is predicted.
    sequence: Int[np.ndarray, "M R S"]


def laid_out(
    values: Shaped[np.ndarray, " n"], places: Int[np.ndarray, "M R S"]
) -> Float[np.ndarray, "M R S"]:
    """Return the value at each place in `values`; 0 where the place is -1."""
    return np.where(places >= 0, values[places], 0).astype(np.float32)


def as_packed(arrays: dict[str, Any], sharing: Sharing | None = None) -> Packed:
    """Make a batch of the arrays of its fields and of `Packed.sequence`, by name."""
    sequence = arrays.pop("sequence")
    return Packed(PackedBatch(**arrays, sharing=sharing), sequence)


def lay_out(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return padding-filled arrays for all that `Packed` has for each prediction."""
    floats = ("weights", "advantages", "behavior_logprobs")
    integers = ("targets", "staleness", "sequence_ids")
    out: dict[str, Any] = {name: np.zeros(shape, np.float32) for name in floats}
    out |= {name: np.zeros(shape, np.int32) for name in integers}
    out["mask"] = np.zeros(shape, bool)
    out["sequence"] = np.full(shape, np.int32(-1))
    return out


def no_experts(
    sequences: Sequence[TrainSequence], shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Return an `experts` array [*shape, layers, k] of "none", or {} without replay.

    Either all sequences have experts, of one dtype and [layers, k], or none has.
    """
    if not sequences or (first := sequences[0].experts) is None:
        return {}
    of_token: tuple[int, ...] = first.shape[1:]
    none = np.iinfo(first.dtype).max
    return {"experts": np.full((*shape, *of_token), none, first.dtype)}


def train_sequences(
    groups: Sequence[Group],
    *,
    weights: np.ndarray,
    learner_version: int,
    experts: Sequence[np.ndarray] | None = None,
) -> dict[int, TrainSequence]:
    """Return the rollouts of groups that carry any weight, by their index in [0, B).

    Args:
        groups: N groups with B rollouts in all.
        weights: float [B, T], zero on tokens that are not trained on.
        learner_version: version of the params that the step starts from.
        experts: B arrays [P - 1 + T, layers, k], if routing is replayed.
    """
    known = [(group.prompt.tokens, each) for group in groups for each in group.rollouts]
    sequences = {}
    for row in np.flatnonzero(weights.any(axis=1)).tolist():
        prompt, rollout = known[row]
        own = weights[row, : len(rollout.completion_tokens)]
        sequences[row] = TrainSequence(
            tokens=np.concatenate([prompt, rollout.completion_tokens]),
            prompt_length=len(prompt),
            weights=own,
            mask=rollout.completion_mask & (own > 0),
            behavior_logprobs=rollout.behavior_logprobs,
            staleness=learner_version - rollout.policy_versions,
            experts=None if experts is None else experts[row],
        )
    return sequences


def pack(
    sequences: Sequence[TrainSequence],
    *,
    row_tokens: int,
    rows_per_microbatch: int,
    row_segments: int = ROW_SEGMENTS,
    short_rows: Sequence[int] = (),
) -> Packed:
    """Lay sequences end to end in rows, and these in as few microbatches as needed.

    The batch is [M, R, S] with R = `rows_per_microbatch` and S = `row_tokens`.  A row
    gets at most `row_segments` sequences.  With `short_rows` those of the last
    microbatch are as `shorten_last` makes them, and the batch has `row_ends`.

    Raises:
        ValueError: a sequence is longer than a row.
    """
    lengths = [sequence.row_length for sequence in sequences]
    if (longest := max(lengths, default=0)) > row_tokens:
        raise ValueError(
            f"a rollout of {longest + 1} tokens does not fit in batch.row_tokens = "
            f"{row_tokens}; raise it"
        )
    rows = first_fit(lengths, row_tokens, row_segments)
    rows, last_end = shorten_last(
        *(rows, lengths, (*short_rows, row_tokens)),
        *(rows_per_microbatch, row_segments),
    )
    filled = -(-len(rows) // rows_per_microbatch)
    shape = (filled * rows_per_microbatch, row_tokens)
    integers = ("tokens", "segment_ids", "positions")
    out = lay_out(shape)
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
            # A prediction's fields stand at the position that makes it.
            predictions = slice(start + sequence.prompt_length - 1, end)
            sequence.write(out, (row, predictions), number=segment, place=number)
            start = end
    arrays: dict[str, Any] = {
        name: array.reshape(filled, rows_per_microbatch, *array.shape[1:])
        for name, array in out.items()
    }
    if short_rows:
        ends = [*[row_tokens] * (filled - 1), last_end][:filled]
        arrays["row_ends"] = np.array(ends, np.int32)
    return as_packed(arrays)


def computed_tokens(batch: PackedBatch) -> int:
    """Count the tokens that pass through the layers, padding left out."""
    if batch.sharing is None:
        return int((batch.segment_ids > 0).sum())
    return int((batch.sharing.place >= 0).sum())


def abstract_microbatch(*, row_tokens: int, rows_per_microbatch: int) -> PackedBatch:
    """Return shapes and dtypes of a microbatch [R, S] that `pack` makes."""
    empty = pack([], row_tokens=row_tokens, rows_per_microbatch=rows_per_microbatch)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), empty.batch
    )


def first_fit(
    lengths: Sequence[int], row_tokens: int, row_segments: int
) -> list[list[int]]:
    """Return for each row the indices in `lengths` of its sequences.

    First fit, longest first: within 11/9 of the fewest rows.  A row gets at most
    `row_segments` sequences.
    """
    rows: list[list[int]] = []
    space: list[int] = []
    rooms = Rooms()
    for number in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length = lengths[number]
        row = rooms.first(length)
        if row is None:
            row = len(rows)
            rows.append([])
            space.append(row_tokens)
            rooms.append(row_tokens)
        rows[row].append(number)
        space[row] -= length
        rooms[row] = space[row] if len(rows[row]) < row_segments else -1
    return rows


def shorten_last(
    rows: list[list[int]],
    lengths: Sequence[int],
    row_tokens: Sequence[int],
    rows_per_microbatch: int,
    row_segments: int,
) -> tuple[list[list[int]], int]:
    """Return rows of `first_fit`, those of the last microbatch as short as they can be.

    They have the first of the ascending `row_tokens` in which its sequences fit, which
    is the second result; with the last, that of `rows`, they stay as they are.
    """
    start = max(len(rows) - 1, 0) // rows_per_microbatch * rows_per_microbatch
    members = [number for row in rows[start:] for number in row]
    own = [lengths[number] for number in members]
    *short, whole = row_tokens
    for most in short:
        if not own or max(own) > most:
            continue
        found = first_fit(own, most, row_segments)
        if len(found) <= rows_per_microbatch:
            return [
                *rows[:start],
                *([members[at] for at in row] for row in found),
            ], most
    return rows, whole
