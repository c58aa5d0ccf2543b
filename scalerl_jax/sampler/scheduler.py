"""Continuous batching: requests into free slots, tokens into completions.

The host's half of the sampler.  It knows slots and requests, not what they are for.
"""

import collections
import dataclasses
import heapq
from collections.abc import Callable, Sequence

import jax
import numpy as np

from scalerl_jax.sampler.engine import (
    DecodeState,
    Engine,
    Prefix,
    Samples,
    padded_length,
)
from scalerl_jax.types import Prompt, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, to be completed once per sample."""

    request_id: int
    tokens: np.ndarray  # int32 [P]
    samples: Samples

    @property
    def num_samples(self) -> int:
        """Completions asked for."""
        return len(self.samples.keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished sample of a request."""

    request_id: int
    sample: int
    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T], False on forced tokens
    logprobs: np.ndarray  # float32 [T], nats
    versions: np.ndarray  # int32 [T]
    cut_off: bool
    interrupted: bool


@dataclasses.dataclass(kw_only=True)
class _Running:
    request_id: int
    sample: int
    pieces: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)


class Scheduler:
    """Keeps the slots of one engine full.  Not thread-safe: one owner at a time."""

    def __init__(self, engine: Engine) -> None:
        """A scheduler with every slot free."""
        self._engine = engine
        self._state: DecodeState = engine.init_decode_state()
        # The lowest slot first: equal histories give equal placements.
        self._free = list(range(engine.max_concurrent_decodes))
        self._running: dict[int, _Running] = {}
        self._waiting: collections.deque[tuple[Request, int]] = collections.deque()
        # A half-placed request, and its prompt as prefilled at a version.
        self._prefix: tuple[Request, int, Prefix] | None = None

    @property
    def free_slots(self) -> int:
        """Slots that no running or waiting sample will take."""
        waiting = sum(request.num_samples - done for request, done in self._waiting)
        return len(self._free) - waiting

    @property
    def busy(self) -> bool:
        """Whether any sample is running or waits for a slot."""
        return bool(self._running or self._waiting)

    def submit(self, request: Request) -> None:
        """Put a request in line.

        Raises:
            ValueError: the prompt is empty or longer than the engine takes.
        """
        longest = self._engine.max_prefill_length
        if not 0 < len(request.tokens) <= longest:
            raise ValueError(
                f"a prompt of {len(request.tokens)} tokens; sampler.max_prompt_tokens "
                f"= {longest} is the limit, and 1 the least"
            )
        self._waiting.append((request, 0))

    def cancel(self, request_id: int) -> int:
        """Drop a request: its waiting samples, and those in slots.

        Returns the number of tokens that were generated in those slots.
        """
        lost = 0
        self._waiting = collections.deque(
            (request, done)
            for request, done in self._waiting
            if request.request_id != request_id
        )
        marked = np.zeros(self._engine.max_concurrent_decodes, bool)
        for slot, running in list(self._running.items()):
            if running.request_id == request_id:
                marked[slot] = True
                left = self._leave(slot)
                lost += sum(len(tokens) for tokens, *_ in left.pieces)
        if marked.any():
            self._state = self._engine.free_resource(self._state, slots=marked)
        return lost

    def step(self, params: PyTree, *, version: int) -> list[Completion]:
        """Fill free slots, make one `generate` call, and return what finished."""
        self._fill(params, version)
        if not self._running:
            return []
        self._state, results = self._engine.generate(params, self._state)
        results = jax.device_get(results)
        finished = []
        for slot in list(self._running):
            running = self._running[slot]
            count = int(results.valid[:, slot].sum())
            running.pieces.append(
                (
                    results.tokens[:count, slot],
                    ~results.forced[:count, slot],
                    results.logprobs[:count, slot],
                    np.full(count, version, np.int32),
                )
            )
            if not results.active[slot]:
                finished.append(self._finish(slot, cut_off=bool(results.cut_off[slot])))
        return finished

    def _fill(self, params: PyTree, version: int) -> None:
        slots = self._engine.max_concurrent_decodes
        while self._waiting and self._free:
            request, done = self._waiting.popleft()
            count = min(len(self._free), request.num_samples - done)
            # Past the last slot: inserted nowhere.
            places = np.full(request.num_samples, slots, np.int32)
            for sample in range(done, done + count):
                slot = heapq.heappop(self._free)
                places[sample] = slot
                self._running[slot] = _Running(
                    request_id=request.request_id, sample=sample
                )
            prefix = self._prefill(request, params, version)
            self._state = self._engine.bulk_insert(
                prefix, self._state, slots=places, samples=request.samples
            )
            self._prefix = None
            if done + count < request.num_samples:
                self._waiting.appendleft((request, done + count))
                self._prefix = (request, version, prefix)

    def _prefill(self, request: Request, params: PyTree, version: int) -> Prefix:
        if self._prefix is not None:
            placed, prefilled_at, prefix = self._prefix
            # By identity: a number can come again with another prompt.
            if placed is request and prefilled_at == version:
                return prefix
        length = len(request.tokens)
        padded = np.zeros(
            padded_length(length, longest=self._engine.max_prefill_length), np.int32
        )
        padded[:length] = request.tokens
        return self._engine.prefill(
            params=params, padded_tokens=padded, true_length=length
        )

    def _finish(self, slot: int, *, cut_off: bool) -> Completion:
        running = self._leave(slot)
        tokens, mask, logprobs, versions = (
            np.concatenate(parts) for parts in zip(*running.pieces, strict=True)
        )
        return Completion(
            request_id=running.request_id,
            sample=running.sample,
            tokens=tokens,
            mask=mask,
            logprobs=logprobs,
            versions=versions,
            cut_off=cut_off,
            interrupted=not mask.all(),
        )

    def _leave(self, slot: int) -> _Running:
        heapq.heappush(self._free, slot)
        return self._running.pop(slot)


def complete(
    engine: Engine,
    params: PyTree,
    prompts: Sequence[Prompt],
    *,
    make_samples: Callable[[Prompt], Samples],
    version: int,
) -> list[Completion]:
    """Every sample of every prompt, in slots of their own, at one version.

    `request_id` is the place of the prompt; completions come as they finish.
    """
    scheduler = Scheduler(engine)
    for place, prompt in enumerate(prompts):
        scheduler.submit(
            Request(
                request_id=place, tokens=prompt.tokens, samples=make_samples(prompt)
            )
        )
    completions: list[Completion] = []
    while scheduler.busy:
        completions += scheduler.step(params, version=version)
    return completions
