"""Sequences of supervised learning: tokens of an answer count, all others are read."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int

from scalerl_jax.batching.packing import Packed, TrainSequence
from scalerl_jax.types import PackedBatch


def answered(
    tokens: Int[np.ndarray, " n"], mask: Bool[np.ndarray, " n"]
) -> TrainSequence:
    """Return a sequence whose tokens under the mask are learned; the first is not."""
    start = int(mask.argmax())
    own = mask[start:]
    assert start and own.any(), "an answer follows a prompt"
    return TrainSequence(
        tokens=tokens,
        prompt_length=start,
        weights=own.astype(np.float32),
        mask=own,
        behavior_logprobs=np.zeros(len(own), np.float32),
        staleness=np.zeros(len(own), np.int32),
    )


def pack_answers(
    sequences: Sequence[TrainSequence],
    pack: Callable[[Sequence[TrainSequence]], Packed],
) -> PackedBatch:
    """Return a batch in which every token of an answer counts alike.

        loss = - sum_t mask[t] * logprob[t] / sum_t mask[t]

    That is REINFORCE with an advantage of 1.
    """
    total = np.float32(sum(sequence.mask.sum() for sequence in sequences))
    weighed = [
        dataclasses.replace(each, weights=each.mask.astype(np.float32) / total)
        for each in sequences
    ]
    batch = pack(weighed).batch
    return dataclasses.replace(batch, advantages=batch.mask.astype(np.float32))
