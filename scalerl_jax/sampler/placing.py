"""From a request to its slot: pages, prompts in chunks, and the rows to insert.

Prompts are cut and packed into prefill chunks, so that none stalls decoding.  Who owns
which page of the KV cache is counted on the host: no array of the device.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from scalerl_jax.sampler.attention import Chunk
from scalerl_jax.sampler.decoding import SlotRows, empty_rows
from scalerl_jax.sampler.engine import MAX_SEQUENCES, Engine
from scalerl_jax.sampler.requests import Request, Sample
from scalerl_jax.sampler.sampling import SamplingRows
from scalerl_jax.sampler.settings import EngineSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """A sample, its slot, and the broken page of its prefix that it copies."""

    slot: int
    sample: Sample
    copy: tuple[int, int] | None  # from page, to page


def insertion(settings: EngineSettings, placed: list[Placed]) -> dict[str, Any]:
    """The arguments of `Engine.insert`, padded to a power of two."""
    count = min(1 << (len(placed) - 1).bit_length(), settings.slots)
    slots = np.full(count, settings.slots, np.int32)
    copies = np.full((2, count), settings.num_pages, np.int32)
    rows = jax.tree.map(np.copy, empty_rows(settings, count))
    for place, each in enumerate(placed):
        slots[place] = each.slot
        if each.copy is not None:
            copies[:, place] = each.copy
        row = each.sample.row or _first_row(settings, each.sample)
        each.sample.row = None
        for held, new in zip(jax.tree.leaves(rows), jax.tree.leaves(row), strict=True):
            held[place] = new
    return dict(slots=slots, rows=rows, copy_from=copies[0], copy_to=copies[1])


def _first_row(settings: EngineSettings, sample: Sample) -> SlotRows:
    """A sample whose prompt is cached but for its last token."""
    request = sample.request
    row = jax.tree.map(lambda rows: rows[0], empty_rows(settings, 1))
    return dataclasses.replace(
        row,
        tokens=request.tokens[-1],
        positions=len(request.tokens) - 1,
        prompt_lengths=len(request.tokens),
        max_tokens=sample.limit,
        keys=request.samples.keys[sample.number],
        active=True,
        thinking_limits=request.samples.thinking_limits[sample.number],
        sampling=jax.tree.map(
            lambda rows: rows[0], SamplingRows.of(request.sampling, 1)
        ),
    )


class PageRun(RuntimeError):
    """More pages were asked for than are free."""


class PageLedger:
    """Pages by number; one may have several owners, and is free when it has none."""

    def __init__(self, num_pages: int) -> None:
        """A ledger in which every page is free."""
        self._owners = np.zeros(num_pages, np.int32)
        # The lowest number last, so that it is taken first: equal histories are equal.
        self._free = list(range(num_pages - 1, -1, -1))
        self.peak = 0

    @property
    def free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Pages with an owner."""
        return len(self._owners) - len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages with one owner each.

        Raises:
            PageRun: fewer are free; none is taken.
        """
        if count > len(self._free):
            raise PageRun(f"{count} pages wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        self._owners[taken] = 1
        self.peak = max(self.peak, self.in_use)
        return taken

    def share(self, pages: list[int]) -> list[int]:
        """The same pages with one more owner."""
        self._owners[pages] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        """One owner fewer for each page."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} has no owner to lose"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)


@dataclasses.dataclass(eq=False, kw_only=True)
class Prefix:
    """Tokens whose keys and values are made, at one policy version."""

    tokens: np.ndarray  # int32
    pages: list[int]
    version: int
    done: int = 0  # tokens in the cache
    place: slice | None = None  # in the last chunk, if it is part of that
    # Of a mixture that reports them: what chunks said, and where it stands there.
    experts: list[tuple[Any, slice]] = dataclasses.field(default_factory=list)

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

    def first_pages(self, settings: EngineSettings) -> int:
        """Pages of its own that a sample needs for its first call."""
        cached = len(self.tokens)
        ahead = min(cached + settings.tokens_per_call, settings.max_tokens)
        return settings.pages_for(ahead) - cached // settings.page_size


def to_go_on(sample: Sample) -> Waiting:
    """A sample that was suspended: all but its last token is to be cached again."""
    return Waiting(
        request=sample.request,
        samples=collections.deque([sample]),
        tokens=sample.tokens()[:-1],
    )


def fill_chunk(engine: Engine, prefixes: Sequence[Prefix]) -> Chunk | None:
    """The next tokens of these prefixes, which are counted as done; None: no more.

    A prefix that an earlier chunk has begun comes first: a chunk takes one past.
    """
    for prefix in prefixes:
        prefix.place = None
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
        prefix.place = places
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


def note_experts(prefixes: Sequence[Prefix], experts: Any) -> None:
    """Let prefixes know the experts [T, layers, k] of the chunk just filled, if any."""
    if experts is None:
        return
    experts.copy_to_host_async()
    for prefix in prefixes:
        if prefix.place is not None:
            prefix.experts.append((experts, prefix.place))
