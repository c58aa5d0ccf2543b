"""Continuous batching: requests into free slots, tokens into completions.

It is the host's half of the sampler, with slots, pages and requests, and independent of
training.  A step dispatches one `generate` call and then reads the results of the
previous call, so that the device never waits for this bookkeeping.

When the pages run out, the sample that was placed last is suspended: it gives up its
pages, and later continues from its own tokens, whose keys and values are computed
again.  The oldest sample is never suspended for another one of its scheduler, so that
at least one always ends.  Schedulers share the pages of a `pool.PagePool`.

Full pages are found again by the tokens in them, at the same version: those of a prompt
that begins like another one, and of an earlier turn (`pages`).

The file is above 400 lines: slots, pages and prefill chunks are assigned together.
"""

import collections
import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Int

from scalerl_jax.data.detokenizer import Detokenizer
from scalerl_jax.sampler.attention import Chunk
from scalerl_jax.sampler.decoding import (
    DecodedTokens,
    DecodeState,
    EngineSettings,
    empty_rows,
    first_row,
)
from scalerl_jax.sampler.engine import MAX_SEQUENCES, Engine, empty_chunk
from scalerl_jax.sampler.pages import Need, Prefix, SequencePages, page_digests
from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.sampler.protocol import check_version
from scalerl_jax.sampler.requests import (
    Completion,
    Request,
    Sample,
    SamplerStats,
    begin_samples,
    resume_sample,
)
from scalerl_jax.types import PyTree

KvOnUpdate = Literal["keep", "recompute"]


@dataclasses.dataclass(eq=False, kw_only=True)
class _Waiting:
    """Samples of one request that start from the same tokens and wait for slots."""

    samples: collections.deque[Sample]
    tokens: np.ndarray  # int32, to cache before a sample can start
    digests: list[bytes]  # of the pages of `tokens` that may be found again
    prefix: Prefix | None = None
    at_once: bool = False  # to cache in one step: a weight update dropped a part

    def first_pages(self, settings: EngineSettings) -> int:
        """Return the number of pages that a sample needs for its first call."""
        ahead = len(self.tokens) + settings.tokens_per_call
        return settings.pages_for(min(ahead, settings.max_tokens))

    def own_pages(self, settings: EngineSettings, pages: SequencePages) -> Need:
        """Return those of them that it does not share with others.

        They are its ring, and what follows the prefix's last full page.
        """
        count, whole = self.first_pages(settings), self.shared_until(settings)
        ring = min(settings.ring_pages, count)
        return pages.need(0, ring) + pages.need(whole, count - whole)

    def shared_until(self, settings: EngineSettings) -> int:
        """Return the number of its first pages that are a ring's, or shared."""
        count, whole = self.first_pages(settings), self.full_pages(settings)
        return max(whole, min(settings.ring_pages, count))

    def full_pages(self, settings: EngineSettings) -> int:
        """Return the number of pages that its tokens fill."""
        return len(self.tokens) // settings.page_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Placed:
    """A sample, its slot, and its copies of the prefix's pages.

    They are the pages of a ring, and the partly filled one.
    """

    slot: int
    sample: Sample
    copies: list[tuple[int, int]]  # (from page, to page)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """A `generate` call whose results are not read yet."""

    samples: list[tuple[int, Sample]]  # slot and sample of each row
    results: DecodedTokens
    version: int


class Scheduler:
    """The `protocol.Sampler` that keeps its slots of one engine full."""

    def __init__(
        self,
        pool: PagePool,
        *,
        kv_on_update: KvOnUpdate = "keep",
        detokenizer: Detokenizer | None = None,
    ) -> None:
        """Start without a request; those with stop strings need a `detokenizer`.

        `kv_on_update`: when another version is loaded, the keys and values of running
        samples are kept, or recomputed with the new params.
        """
        self._pool = pool
        self._engine = engine = pool.engine
        self._settings = engine.settings
        self._kv_on_update = kv_on_update
        self._detokenizer = detokenizer
        self._rows = engine.init_rows()
        self.pages = pool.new_pages()
        # The lowest slot first: placements are reproducible.
        self._free = list(range(engine.settings.slots))
        self._running: dict[int, Sample] = {}  # by slot, in the order of placement
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._call: _Call | None = None
        self._ended: list[tuple[Sample, Completion]] = []  # since the last step
        self._params: PyTree = None  # from `load`
        self._version: int | None = None
        self._updated = False  # another version was loaded since the last step
        self._stats = SamplerStats()
        pool.join(self)

    @property
    def _state(self) -> DecodeState:
        """The pool's pages, with the rows of this scheduler's slots."""
        return self._pool.state(self._rows)

    @_state.setter
    def _state(self, state: DecodeState) -> None:
        self._pool.pages, self._rows = state.pages, state.rows

    @property
    def free_slots(self) -> int:
        """Number of slots without a running sample, minus the waiting samples."""
        return len(self._free) - sum(len(each.samples) for each in self._waiting)

    @property
    def busy(self) -> bool:
        """Return whether any sample is running or waits, or has ended since a step."""
        return bool(self._running or self._waiting or self._ended)

    @property
    def stats(self) -> SamplerStats:
        """Counts so far."""
        held = sum(
            len(each.request.tokens) + each.num_tokens - 1
            for each in self._running.values()
        )
        self._stats.tokens_held = held
        self._stats.pages_in_use = self.pages.in_use
        self._stats.peak_pages = self.pages.peak
        return self._stats

    def submit(self, request: Request) -> None:
        """Queue a request; see `protocol.Sampler`."""
        samples = begin_samples(request, self._settings, self._detokenizer)
        alike: dict[bytes, list[Sample]] = {}  # by the tokens with which they start
        for sample in samples:
            alike.setdefault(sample.tokens().tobytes(), []).append(sample)
        self._waiting += map(self._entry, alike.values())

    def resume(
        self, request: Request, turn: Completion, appended: Int[np.ndarray, " n"]
    ) -> None:
        """Queue a sample again, before new ones; see `protocol.Sampler`.

        It has no slot any more.  Those of its tokens whose pages are not found in the
        cache are prefilled again.
        """
        sample = resume_sample(
            request, turn, appended, self._settings, self._detokenizer
        )
        self._waiting.appendleft(self._entry([sample]))

    def cancel(self, request_id: int) -> int:
        """Drop a request; return the number of its tokens that are in no completion."""
        lost = 0
        for entry in list(self._waiting):
            if entry.samples[0].request.request_id == request_id:
                lost += sum(each.num_tokens - each.begun for each in entry.samples)
                self._waiting.remove(entry)
                self._drop_prefix(entry)
        running = self._running.items()
        slots = [at for at, each in running if each.request.request_id == request_id]
        left = [self._leave(slot) for slot in slots]
        lost += sum(each.num_tokens - each.begun for each in left)
        self._stop(slots)
        for each in list(self._ended):  # read in a step of another scheduler
            sample, completion = each
            if completion.request_id == request_id:
                lost += sample.num_tokens - sample.begun
                self._stats.failed -= bool(completion.failure)
                self._ended.remove(each)
        self._stats.wasted_tokens += lost
        return lost

    def close(self) -> None:
        """Drop all requests, and leave the pool; see `protocol.Sampler`."""
        self._call = None
        self._drop_prefixes()
        self._waiting.clear()
        for slot in list(self._running):
            self._leave(slot)
        self.pages.forget()
        self._ended = []
        self._pool.leave(self)

    def load(self, params: PyTree, version: int) -> None:
        """Use params from the next step on; see `protocol.Sampler`.

        With kv_on_update = "recompute" the next step recomputes keys and values.
        """
        params = self._engine.load_params(params)
        check_version(version, last=self._version)
        if version != self._version:
            self._updated = True
            self.pages.forget()
        self._params, self._version = params, version

    def step(self) -> list[Completion]:
        """Fill free slots, dispatch one `generate` call, return what has finished."""
        params, version = self._params, self._version
        assert version is not None, "load params first"
        self._pool.begin_step(self)
        if self._updated and self._kv_on_update == "recompute":
            self._recompute(params)
        self._updated = False
        self._admit(params, version)
        call = self._dispatch(params, version)
        self._read()
        self._call = call
        ended, self._ended = self._ended, []
        return [completion for _, completion in ended]

    def _recompute(self, params: PyTree) -> None:
        """Recompute the keys and values of every running sample with these params."""
        self._read()
        prefixes = [
            Prefix(tokens=sample.tokens()[:-1], pages=sample.pages, version=0)
            for sample in self._running.values()
        ]
        while self._prefill(params, prefixes, again=True):
            pass
        for sample in self._running.values():
            sample.cached_version = self._version

    def _prefill(
        self,
        params: PyTree,
        prefixes: list[Prefix],
        *,
        most: int | None = None,
        again: bool = False,
    ) -> int:
        """Prefill one chunk of these prefixes; return the number of its tokens."""
        chunk = fill_chunk(self._engine, prefixes, most=most)
        if chunk is None:
            return 0
        self._state, experts = self._engine.prefill(params, self._state, chunk)
        if experts is not None:  # a mixture that reports them
            experts.copy_to_host_async()
        self._stats.note_prefill(chunk, again=again)
        for prefix in prefixes:
            if prefix.place is not None:
                full = prefix.done // self._settings.page_size
                self.pages.know(prefix.pages, prefix.digests[:full])
                if experts is not None:
                    prefix.experts.append((experts, prefix.place))
        return int(chunk.query_starts[-1])

    # -- from waiting to running ------------------------------------------------------

    def _admit(self, params: PyTree, version: int) -> None:
        """Prefill `prefill_tokens` at most, or, if no sample is running, until one can.

        They may be several chunks, since a chunk has one past.  A prefix of which a
        weight update dropped a part is completed in this step: one that needs more
        steps than there are between two updates would never be ready.
        """
        left = self._settings.prefill_tokens
        while self._waiting and self._free:
            begun = self._begin_prefixes(version)
            prefixes = [prefix for _, prefix in begun]
            for prefix in prefixes:
                self._stats.prefix_hit_tokens += self._find_again(prefix)
            count = self._prefill(params, prefixes, most=left if left > 0 else None)
            left -= count
            self._place()
            due = any(entry.at_once and not prefix.ready for entry, prefix in begun)
            if self._running and not due and (left <= 0 or not count):
                return

    def _begin_prefixes(self, version: int) -> list[tuple[_Waiting, Prefix]]:
        """Return entries with free slots, and their prefixes at this version."""
        for entry in self._waiting:
            prefix = entry.prefix
            if prefix is not None and prefix.version != version:
                entry.at_once |= prefix.found < prefix.done < len(prefix.tokens)
                self._drop_prefix(entry)  # never used across versions
        slots, begun = len(self._free), []
        for entry in self._waiting:
            if slots <= 0:
                break
            slots -= len(entry.samples)
            if entry.prefix is None:
                prefix = Prefix(
                    tokens=entry.tokens,
                    pages=[],
                    version=version,
                    digests=entry.digests,
                )
                found = self._find_again(prefix)
                held = len(prefix.pages)
                missing = self._settings.pages_for(len(entry.tokens)) - held
                # Keep pages for its first sample, and one for each running sample.
                own = entry.own_pages(self._settings, self.pages)
                need = self.pages.need(held, missing) + own
                if not self._find(need, alone=not (self._running or begun)):
                    self.pages.release(prefix.pages)
                    break
                prefix.pages += self.pages.take(held, missing)
                entry.prefix = prefix
                self._stats.prefix_hit_tokens += found
            begun.append((entry, entry.prefix))
        return begun

    def _entry(self, samples: list[Sample]) -> _Waiting:
        """Return samples that start alike, to wait until all but the last is cached."""
        tokens = samples[0].tokens()[:-1]
        return _Waiting(
            samples=collections.deque(samples),
            tokens=tokens,
            digests=self._digests(tokens),
        )

    def _digests(self, tokens: np.ndarray) -> list[bytes]:
        """Return the digests of pages that may be found again."""
        size = self._settings.page_size
        return page_digests(tokens, size) if self._pool.prefix_cache else []

    def _find_again(self, prefix: Prefix) -> int:
        """Give a prefix the pages that are found, if they hold more than it has cached.

        Return the number of tokens that it has more.
        """
        found = [] if prefix.ready else self.pages.find(prefix.digests)
        more = len(found) * self._settings.page_size - prefix.done
        if more <= 0:
            return 0
        own = prefix.pages[: len(found)]
        prefix.pages[: len(found)] = self.pages.share(found)
        self.pages.release(own)
        prefix.done += more
        prefix.found += more
        return more

    def _find(self, own: Need, *, alone: bool, keep: _Waiting | None = None) -> bool:
        """Return whether a new sample's own pages are free; see `PagePool.find`.

        They always are for one that would be `alone`, at the cost of all prefixes
        except that of `keep`.
        """
        need = own + self.reserved()
        if self._pool.find(self, need, new=True):
            return True
        if not alone:
            return False
        self._drop_prefixes(keep=keep)
        return self._pool.find(self, need, new=True, alone=True)

    @property
    def wants_pages(self) -> bool:
        """Return whether a sample waits although a slot is free."""
        return bool(self._waiting and self._free)

    def reserved(self) -> Need:
        """Return a page for each running sample."""
        return self.pages.reserve(len(each.pages) for each in self._running.values())

    def give_way(self, least: int = 0) -> bool:
        """Free pages, and keep `least` running samples; return False if none can be.

        First the prefixes go, then the samples that have ended, then the youngest.
        """
        if any(entry.prefix is not None for entry in self._waiting):
            self._drop_prefixes()
        elif self._call is not None:
            self._read()
        elif len(self._running) > least:
            self._suspend(next(reversed(self._running)))
        else:
            return False
        return True

    def _place(self) -> None:
        """Put samples with a ready prefix into slots."""
        placed: list[_Placed] = []
        for entry in list(self._waiting):
            if entry.prefix is None or not entry.prefix.ready:
                continue
            while entry.samples and self._free:
                own = entry.own_pages(self._settings, self.pages)
                if not self._find(own, alone=not self._running, keep=entry):
                    break
                placed.append(self._take_slot(entry))
            if not entry.samples:
                self.pages.release(entry.prefix.pages)
                self._waiting.remove(entry)
        if placed:
            self._state = self._engine.insert(
                self._state, **_insertion(self._engine, placed)
            )

    def _take_slot(self, entry: _Waiting) -> _Placed:
        assert entry.prefix is not None, "only a ready prefix is placed"
        sample, slot = entry.samples.popleft(), heapq.heappop(self._free)
        settings, held = self._settings, entry.prefix.pages
        count, whole = entry.first_pages(settings), entry.shared_until(settings)
        ring = self.pages.take(0, min(settings.ring_pages, count))
        shared = self.pages.share(held[len(ring) : whole])
        sample.pages = ring + shared + self.pages.take(whole, count - whole)
        copied = [*range(min(len(ring), len(held)))]
        if len(held) > max(whole, len(ring)):
            copied.append(whole)  # the partly filled one
        if sample.prompt_experts is None:  # a resumed sample keeps its first ones
            sample.prompt_experts = entry.prefix.experts
        sample.cached_version = entry.prefix.version
        self._running[slot] = sample
        copies = [(held[place], sample.pages[place]) for place in copied]
        return _Placed(slot=slot, sample=sample, copies=copies)

    def _drop_prefix(self, entry: _Waiting) -> None:
        if entry.prefix is not None:
            self._stats.prefixes_dropped += 1
            self.pages.release(entry.prefix.pages)
            entry.prefix = None

    def _drop_prefixes(self, *, keep: _Waiting | None = None) -> None:
        for entry in self._waiting:
            if entry is not keep:
                self._drop_prefix(entry)

    # -- a call, and its results ------------------------------------------------------

    def _dispatch(self, params: PyTree, version: int) -> _Call | None:
        """Dispatch a call for all samples that may continue; the last is read later."""
        for sample in list(self._running.values()):
            self._reserve(sample)
        in_order = sorted(self._running.items())
        rows = [(slot, sample) for slot, sample in in_order if sample.goes_on]
        if not rows:
            return None
        longest = max(len(sample.pages) for _, sample in rows)
        count, width = self._engine.decode_sizes.choose(len(rows), longest)
        slots = np.full(count, self._settings.slots, np.int32)
        table = np.zeros((count, width), np.int32)
        for place, (slot, sample) in enumerate(rows):
            slots[place] = slot
            table[place, : len(sample.pages)] = sample.pages
            sample.in_flight += self._settings.tokens_per_call
        self._state, results = self._engine.generate(
            params, self._state, slots=slots, table=table
        )
        for array in jax.tree.leaves(results):
            array.copy_to_host_async()
        self._stats.calls += 1
        held = self.stats.tokens_held
        self._stats.peak_tokens_held = max(self._stats.peak_tokens_held, held)
        return _Call(samples=rows, results=results, version=version)

    def _reserve(self, sample: Sample) -> None:
        """Take pages for a sample's next call; suspend the youngest ones if needed."""
        while sample in self._running.values() and sample.goes_on:
            tokens = sample.num_tokens + sample.in_flight
            tokens = min(tokens + self._settings.tokens_per_call, sample.limit)
            cached = len(sample.request.tokens) + tokens - 1
            held = len(sample.pages)
            missing = max(0, self._settings.pages_for(cached) - held)
            need = self.pages.need(held, missing)
            if self._pool.find(self, need):
                sample.pages += self.pages.take(held, missing)
                return
            if not self.give_way(least=1):
                found = self._pool.find(self, need, alone=True)
                assert found, "the engine has pages for one sequence"

    def _suspend(self, slot: int) -> None:
        assert self._call is None, "its tokens in flight would be lost"
        # Copy all rows to the host: taking one on the device would need a program.
        rows = jax.device_get(self._state.rows)
        sample = self._leave(slot)
        sample.row = jax.tree.map(lambda held: np.array(held[slot : slot + 1]), rows)
        self._stop([slot])
        self._stats.suspended += 1
        self._waiting.appendleft(self._entry([sample]))

    def _read(self) -> None:
        """Read the results of the last call, if there is one."""
        call, self._call = self._call, None
        if call is None:
            return
        results = jax.device_get(call.results)
        stopped = []
        for column, (slot, sample) in enumerate(call.samples):
            sample.in_flight -= self._settings.tokens_per_call
            count = int(results.valid[:, column].sum())
            self._stats.note_generated(sample, count)
            if self._running.get(slot) is not sample:
                self._stats.wasted_tokens += count
                continue
            piece = _piece(results, column, count, call.version)
            keep = sample.stops and sample.stops.end(piece["tokens"])
            if keep is not None:
                self._stats.wasted_tokens += count - keep
                piece = {name: array[:keep] for name, array in piece.items()}
                stopped.append(slot)
            sample.pieces.append(piece)
            tokens, listener = piece["tokens"], sample.request.listener
            sample.num_tokens += len(tokens)
            if listener is not None and len(tokens):
                listener(sample.number, tokens, piece["logprobs"])
            if keep is not None:
                self._finish(slot, call.version, stopped=True)
            elif not results.active[column]:
                self._finish(
                    slot,
                    call.version,
                    cut_off=bool(results.cut_off[column]),
                    failed=bool(results.failed[column]),
                )
        self._stop(stopped)

    def _finish(
        self,
        slot: int,
        version: int,
        *,
        cut_off: bool = False,
        stopped: bool = False,
        failed: bool = False,
    ) -> None:
        sample = self._leave(slot)
        self._stats.failed += failed
        failure = sample.failure(version) if failed else ""
        completion = sample.completion(
            cut_off=cut_off, stopped=stopped, failure=failure
        )
        self._ended.append((sample, completion))

    def _leave(self, slot: int) -> Sample:
        heapq.heappush(self._free, slot)
        sample = self._running.pop(slot)
        if sample.cached_version == self._version:
            # A call writes no keys and values of the last two tokens of an ended one.
            self.pages.know(sample.pages, self._digests(sample.tokens()[:-2]))
        self.pages.release(sample.pages)
        sample.pages = []
        return sample

    def _stop(self, slots: Sequence[int]) -> None:
        """Stop sequences that are still active on the device."""
        if slots:
            marked = np.zeros(self._settings.slots, bool)
            marked[list(slots)] = True
            self._state = self._engine.free_resource(self._state, slots=marked)


def _piece(
    results: DecodedTokens, column: int, count: int, version: int
) -> dict[str, np.ndarray]:
    """Return per-token fields of `Completion` for a column's first `count` tokens."""
    arrays = dict(
        tokens=results.tokens,
        logprobs=results.logprobs,
        full_logprobs=results.full_logprobs,
        top_tokens=results.top_tokens,
        top_logprobs=results.top_logprobs,
        experts=results.experts,
    )
    piece = {
        name: np.asarray(array[:count, column])
        for name, array in arrays.items()
        if array is not None
    }
    piece["mask"] = ~np.asarray(results.forced[:count, column])
    piece["versions"] = np.full(count, version, np.int32)
    return piece


def _insertion(engine: Engine, placed: list[_Placed]) -> dict[str, Any]:
    """Return the arguments of `Engine.insert`, padded to one of its sizes."""
    settings = engine.settings
    (count,) = engine.insert_sizes.choose(len(placed))
    slots = np.full(count, settings.slots, np.int32)
    each = settings.copied_pages
    copies = np.full((2, count * each), settings.num_pages, np.int32)
    rows = jax.tree.map(np.copy, empty_rows(settings, count))
    for place, one in enumerate(placed):
        slots[place] = one.slot
        for at, pair in enumerate(one.copies, place * each):
            copies[:, at] = pair
        sample, request = one.sample, one.sample.request
        row = sample.row or first_row(
            settings,
            sample.tokens(),
            written=sample.num_tokens,
            max_tokens=sample.limit,
            key=request.samples.keys[sample.number],
            thinking_limit=sample.thinking_limit,
            sampling=request.sampling,
        )
        sample.row = None
        for held, new in zip(jax.tree.leaves(rows), jax.tree.leaves(row), strict=True):
            held[place : place + 1] = new
    return dict(slots=slots, rows=rows, copy_from=copies[0], copy_to=copies[1])


def fill_chunk(
    engine: Engine, prefixes: Sequence[Prefix], *, most: int | None = None
) -> Chunk | None:
    """Return a chunk of the prefixes' next tokens; None: all are done.

    The tokens, `most` at most, are counted as done.  A prefix with cached tokens comes
    first, and those that share them with it, since a chunk can attend only to the
    cached tokens of its first sequence; then come prefixes without any.
    """
    for prefix in prefixes:
        prefix.place = None
    open_ones = [prefix for prefix in prefixes if not prefix.ready]
    open_ones.sort(key=lambda prefix: prefix.done == 0)
    page_size = engine.settings.page_size
    together = [
        each for each in open_ones if _go_together(open_ones[0], each, page_size)
    ]
    wanted = sum(len(prefix.tokens) - prefix.done for prefix in together)
    if not wanted:
        return None
    wanted = min(wanted, most or wanted)
    (size,) = engine.chunk_sizes.choose(wanted)
    chunk = empty_chunk(engine.settings, size)
    size = min(size, wanted)
    filled, count = 0, 0
    for prefix in together[:MAX_SEQUENCES]:
        if filled == size:
            break
        here = min(len(prefix.tokens) - prefix.done, size - filled)
        places = slice(filled, filled + here)
        chunk.tokens[places] = prefix.tokens[prefix.done : prefix.done + here]
        chunk.positions[places] = np.arange(prefix.done, prefix.done + here)
        chunk.segments[places] = count + 1
        chunk.table[count, : len(prefix.pages)] = prefix.pages
        prefix.place = places
        prefix.done += here
        chunk.lengths[count] = prefix.done
        filled, count = filled + here, count + 1
        chunk.query_starts[count:] = filled
    chunk.num_sequences[0] = count
    return chunk


def _go_together(first: Prefix, other: Prefix, page_size: int) -> bool:
    """Return whether a prefix has no cached tokens, or those of the first one."""
    pages, rest = divmod(other.done, page_size)
    return other is first or (
        other.done in (0, first.done)
        and not rest
        and other.pages[:pages] == first.pages[:pages]
    )
