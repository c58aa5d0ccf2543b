"""Packing of rollouts into streams that hold the prompt of a group only once.

The batch is like that of `batching.packing.pack`, with `Sharing`, which
`model.prompt_sharing` reads on the device.  The last token of a prompt is not shared:
it predicts the first token of each completion, and a position has only one target.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from scalerl_jax.batching.packing import (
    ROW_SEGMENTS,
    Packed,
    TrainSequence,
    as_packed,
    lay_out,
    no_experts,
)
from scalerl_jax.batching.rooms import Rooms
from scalerl_jax.types import PackedBatch, Sharing

# Sequences, each with its place among all that are packed.
_Numbered = list[tuple[int, TrainSequence]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamShape:
    """Sizes of a stream, which never change; a microbatch has one stream per device."""

    rows: int  # rows that attention reads for the stream
    row_tokens: int  # S
    row_segments: int = ROW_SEGMENTS  # sequences in a row, at most
    shared_tokens: int  # room for prompts, at the head of the stream
    own_tokens: int  # room for completions, each after the last token of its prompt
    group_size: int  # sequences that share a prompt, at most

    @property
    def tokens(self) -> int:
        """U, tokens of the whole stream."""
        return self.shared_tokens + self.own_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Member:
    """A sequence in a stream."""

    sequence: TrainSequence
    number: int  # its place among all sequences
    group: int  # number of its group, whose sequences share the prompt
    row: int
    start: int  # in its row
    place: int  # of its own tokens, in the stream


class _Stream:
    """A stream that is being filled."""

    def __init__(self, shape: StreamShape) -> None:
        self.shape = shape
        self.space = [shape.row_tokens] * shape.rows
        self.segments = [0] * shape.rows
        self.shared, self.own = 0, 0
        self.prompts: dict[int, int] = {}  # number of the group -> place of its prompt
        self.members: list[_Member] = []

    @property
    def room(self) -> int:
        """Room of the row that has most of it; -1: no row takes another sequence."""
        free, most = (
            zip(self.space, self.segments, strict=True),
            self.shape.row_segments,
        )
        open_rows = (left for left, segments in free if segments < most)
        return max(open_rows, default=-1) if self.own < self.shape.own_tokens else -1

    def add(self, number: int, sequence: TrainSequence, group: int) -> bool:
        """Place a sequence if row, prompts and completions have room; say whether."""
        shape, prompt = self.shape, _shared_part(sequence)
        own, known = len(sequence.weights), group in self.prompts
        fits = (
            self.own + own <= shape.own_tokens
            and self.shared + (0 if known else len(prompt)) <= shape.shared_tokens
        )
        row = next(
            (
                row
                for row, left in enumerate(self.space)
                if left >= sequence.row_length
                and self.segments[row] < shape.row_segments
            ),
            None,
        )
        if not fits or row is None:
            return False
        if not known:
            self.prompts[group] = self.shared
            self.shared += len(prompt)
        self.members.append(
            _Member(
                sequence=sequence,
                number=number,
                group=group,
                row=row,
                start=shape.row_tokens - self.space[row],
                place=shape.shared_tokens + self.own,
            )
        )
        self.own += own
        self.space[row] -= sequence.row_length
        self.segments[row] += 1
        return True


def _shared_part(sequence: TrainSequence) -> np.ndarray:
    return sequence.tokens[: sequence.prompt_length - 1]


def pack_shared(
    sequences: Sequence[TrainSequence], shape: StreamShape, *, streams: int
) -> Packed:
    """Lay sequences in microbatches [M, ...] of `streams` streams, greedily in few.

    Sequences of one prompt are kept in one stream as far as it holds them.  Tokens,
    positions and experts are [M, D, U]; see `types.PackedBatch` for the other fields.

    Raises:
        ValueError: a sequence is longer than an empty stream has room for.
    """
    filled: list[_Stream] = []
    groups: dict[bytes, _Numbered] = {}
    for number, sequence in enumerate(sequences):
        of_prompt = groups.setdefault(_shared_part(sequence).tobytes(), [])
        of_prompt.append((number, sequence))
    by_size = sorted(
        groups.values(), key=lambda group: -sum(each.row_length for _, each in group)
    )
    parts = [
        group[start : start + shape.group_size]
        for group in by_size
        for start in range(0, len(group), shape.group_size)
    ]
    rooms = Rooms()
    for number, part in enumerate(parts):
        _place_group(filled, rooms, part, number, shape)
    while len(filled) % streams:
        filled.append(_Stream(shape))
    arrays = [
        _arrays(stream) | _experts(stream, no_experts(sequences, (shape.tokens,)))
        for stream in filled
    ]
    return _stacked(arrays, shape, streams)


def _stacked(arrays: list[dict[str, Any]], shape: StreamShape, streams: int) -> Packed:
    """Stack the arrays of M * streams streams into a batch [M, ...]."""
    stacked: dict[str, Any] = {
        name: np.stack([each[name] for each in arrays]).reshape(
            -1, streams, *arrays[0][name].shape
        )
        for name in arrays[0]
    }
    for name in ("segment_ids", "source"):  # [M, streams, rows, S]
        stacked[name] = stacked[name].reshape(
            -1, streams * shape.rows, shape.row_tokens
        )
    sharing = {name: stacked.pop(name) for name in ("source", "place", "copies")}
    return as_packed(stacked, Sharing(**sharing))


def abstract_streams(shape: StreamShape, *, streams: int) -> PackedBatch:
    """Return shapes and dtypes of a microbatch of `pack_shared`."""
    packed = _stacked([_arrays(_Stream(shape))] * streams, shape, streams)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), packed.batch
    )


def _place_group(
    filled: list[_Stream],
    rooms: Rooms,
    group: _Numbered,
    number: int,
    shape: StreamShape,
) -> None:
    """Put a group's sequences, longest first, into the first streams with room.

    `rooms` has for each stream the row with most of it.
    """
    left = sorted(group, key=lambda each: -each[1].row_length)
    shortest = left[-1][1].row_length
    at = rooms.first(shortest)
    while left and at is not None:
        left = [each for each in left if not filled[at].add(*each, number)]
        rooms[at] = filled[at].room
        shortest = min((each.row_length for _, each in left), default=shortest)
        at = rooms.first(shortest, since=at + 1)
    while left:
        stream = _Stream(shape)
        rest = [each for each in left if not stream.add(*each, number)]
        if len(rest) == len(left):
            _, longest = left[0]
            raise ValueError(
                f"a rollout of {longest.prompt_length} + {len(longest.weights)} tokens "
                f"does not fit in a stream of batch.shared_tokens = "
                f"{shape.shared_tokens}, batch.own_tokens = {shape.own_tokens} and "
                f"rows of batch.row_tokens = {shape.row_tokens}; raise them"
            )
        filled.append(stream)
        rooms.append(stream.room)
        left = rest


def _arrays(stream: _Stream) -> dict[str, Any]:
    """Return one stream's fields of `Packed`, `PackedBatch` and `Sharing`, by name."""
    shape = stream.shape
    own, tokens = (shape.own_tokens,), (shape.tokens,)
    rows = (shape.rows, shape.row_tokens)
    out: dict[str, Any] = lay_out(own)
    out |= {name: np.zeros(tokens, np.int32) for name in ("tokens", "positions")}
    out |= {name: np.zeros(rows, np.int32) for name in ("segment_ids", "source")}
    out["place"] = np.full(tokens, -1, np.int32)
    copies = (shape.shared_tokens, shape.group_size - 1)
    out["copies"] = np.full(copies, -1, np.int32)
    uses = dict.fromkeys(stream.prompts, 0)
    segments = [0] * shape.rows
    for number, member in enumerate(stream.members, 1):
        sequence, row, start = member.sequence, member.row, member.start
        prompt, count = _shared_part(sequence), len(sequence.weights)
        first, end = stream.prompts[member.group], start + sequence.row_length
        shared = slice(first, first + len(prompt))
        mine = slice(member.place, member.place + count)
        segments[row] += 1
        out["segment_ids"][row, start:end] = segments[row]
        out["source"][row, start : start + len(prompt)] = np.arange(len(prompt)) + first
        out["source"][row, start + len(prompt) : end] = np.arange(count) + member.place
        in_rows = row * shape.row_tokens + np.arange(start, end)
        if uses[member.group] == 0:
            out["tokens"][shared] = prompt
            out["positions"][shared] = np.arange(len(prompt))
            out["place"][shared] = in_rows[: len(prompt)]
        else:
            out["copies"][shared, uses[member.group] - 1] = in_rows[: len(prompt)]
        uses[member.group] += 1
        out["tokens"][mine] = sequence.tokens[len(prompt) : -1]
        out["positions"][mine] = np.arange(len(prompt), sequence.row_length)
        out["place"][mine] = in_rows[len(prompt) :]
        first_target = member.place - shape.shared_tokens
        targets = slice(first_target, first_target + count)
        sequence.write(out, targets, number=number, place=member.number)
    return out


def _experts(stream: _Stream, out: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Write experts to replay into `out`; a prompt gets its first sequence's."""
    for member in reversed(stream.members if out else ()):
        experts, count = member.sequence.experts, len(member.sequence.weights)
        assert experts is not None, "all sequences have them, or none"
        first, own = stream.prompts[member.group], len(experts) - count
        out["experts"][first : first + own] = experts[:own]
        out["experts"][member.place : member.place + count] = experts[own:]
    return out
