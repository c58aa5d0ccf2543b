"""Prompts cut and packed into prefill chunks, so that none stalls decoding."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from scalerl_jax.sampler.attention import Chunk
from scalerl_jax.sampler.engine import MAX_SEQUENCES, Engine
from scalerl_jax.sampler.requests import Request, Sample


@dataclasses.dataclass(eq=False, kw_only=True)
class Prefix:
    """Tokens whose keys and values are made, at one policy version."""

    tokens: np.ndarray  # int32
    pages: list[int]
    version: int
    done: int = 0  # tokens in the cache

    @property
    def ready(self) -> bool:
        """Return whether all of it is in the cache."""
        return self.done == len(self.tokens)


@dataclasses.dataclass(eq=False, kw_only=True)
class Waiting:
    """Samples of one request that begin from the same tokens, and wait for slots."""

    request: Request
    samples: collections.deque[Sample]
    tokens: np.ndarray  # int32, to be cached before a sample can go on
    prefix: Prefix | None = None


def fill_chunk(engine: Engine, prefixes: Sequence[Prefix]) -> Chunk | None:
    """The next tokens of these prefixes, which are counted as done; None: no more.

    A prefix that an earlier chunk has begun comes first: a chunk takes one past.
    """
    open_ones = [prefix for prefix in prefixes if not prefix.ready]
    open_ones.sort(key=lambda prefix: prefix.done == 0)
    wanted = sum(len(prefix.tokens) - prefix.done for prefix in open_ones)
    if not wanted:
        return None
    sizes = engine.chunk_sizes
    size = next((each for each in sizes if each >= wanted), sizes[-1])
    width = engine.settings.pages_per_slot
    tokens, positions, segments = (np.zeros(size, np.int32) for _ in range(3))
    table = np.zeros((MAX_SEQUENCES, width), np.int32)
    starts = np.zeros(MAX_SEQUENCES + 1, np.int32)
    lengths = np.zeros(MAX_SEQUENCES, np.int32)
    filled, count = 0, 0
    for prefix in open_ones[:MAX_SEQUENCES]:
        if filled == size or (prefix.done and count):
            break
        here = min(len(prefix.tokens) - prefix.done, size - filled)
        places = slice(filled, filled + here)
        tokens[places] = prefix.tokens[prefix.done : prefix.done + here]
        positions[places] = np.arange(prefix.done, prefix.done + here)
        segments[places] = count + 1
        table[count, : len(prefix.pages)] = prefix.pages
        prefix.done += here
        lengths[count] = prefix.done
        filled, count = filled + here, count + 1
        starts[count] = filled
    starts[count + 1 :] = filled
    return Chunk(
        tokens=tokens,
        positions=positions,
        segments=segments,
        table=table,
        query_starts=starts,
        lengths=lengths,
        num_sequences=np.array([count], np.int32),
    )
