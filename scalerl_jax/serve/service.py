"""Dispatch of orders to the replicas of the sampler, and of events to the orders.

A `Service` runs on the event loop.  Each replica works in a thread of its own, which
hands the events of each request back to the loop.
"""

import asyncio
import contextlib
import functools
import itertools
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np

from scalerl_jax.sampler.decoding import NEVER
from scalerl_jax.sampler.requests import Completion, Request, Samples
from scalerl_jax.sampler.sampling import sample_keys
from scalerl_jax.sampler.scoring import ScoredTokens, ToScore
from scalerl_jax.serve.fields import ApiError
from scalerl_jax.serve.orders import CompletionOrder, Served
from scalerl_jax.serve.replica import Event, Failed, NewTokens, SamplingThread

_LAST_WORDS_S = 2.0  # to write answers that are already complete


class Placed:
    """An order in progress: its events, with the first choice of their request."""

    def __init__(self, order: CompletionOrder) -> None:
        """Make the order's queues of events, empty."""
        self.order = order
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.scored: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()  # by prompt

    async def next(self) -> tuple[int, NewTokens | Completion]:
        """Return the next event, and the index of its choice.

        Raises:
            ApiError: a completion failed, or can no longer come.
        """
        first, event = await self.events.get()
        if isinstance(event, Failed):
            raise ApiError(event.message, status=event.status, code=event.code)
        assert not isinstance(event, ScoredTokens), "these have a queue of their own"
        if isinstance(event, Completion) and event.failure:
            raise ApiError(event.failure, status=500, code="sampling_failed")
        return first + event.sample, event

    async def prompt_scores(self) -> list[ScoredTokens]:
        """Return the log-probabilities of every prompt's tokens, once all have come.

        Raises:
            ApiError: some are not finite, or can no longer come.
        """
        found: dict[int, ScoredTokens] = {}
        while len(found) < len(self.order.prompts):
            place, event = await self.scored.get()
            if isinstance(event, Failed):
                raise ApiError(event.message, status=event.status, code=event.code)
            assert isinstance(event, ScoredTokens), "others have a queue of their own"
            found[place] = event
        return [found[place] for place in sorted(found)]


class Service:
    """Admits orders, as long as the server is not stopping."""

    def __init__(self, served: Served, samplers: Sequence[SamplingThread]) -> None:
        """Make it on the event loop that it will run on; one sampler per replica."""
        self.served = served
        self.samplers = samplers
        self.stopping = asyncio.Event()
        self.prompt_tokens = 0  # admitted
        self.completion_tokens = 0  # of finished completions
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._answering = 0
        self._compiling = asyncio.Lock()
        self._ids = itertools.count()
        _make_keys(0, served)  # compiled before the loop has requests to wait for it

    @property
    def running(self) -> int:
        """Completions in slots, or about to be, of all replicas."""
        return sum(min(each.samples, self.served.slots) for each in self.samplers)

    @property
    def waiting(self) -> int:
        """Completions that wait for a slot, of all replicas."""
        return sum(max(0, each.samples - self.served.slots) for each in self.samplers)

    @property
    def slots(self) -> int:
        """Completions that all replicas sample together."""
        return self.served.slots * len(self.samplers)

    def count(self, name: str) -> int:
        """Return the sum of a count of the replicas' samplers."""
        return sum(getattr(each.stats, name) for each in self.samplers)

    def stopped(self) -> ApiError:
        """Return the error for requests that come while the server is stopping."""
        return ApiError("the server is stopping", status=503, code="stopping")

    def stop(self) -> None:
        """Admit no more orders; from any thread, or a signal handler."""
        self._loop.call_soon_threadsafe(self.stopping.set)

    async def drain(self, timeout_s: float) -> None:
        """Return once all requests are answered; at the timeout fail the open ones."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        if self._idle.is_set():
            return
        message = f"the server stops and this took over --drain_s = {timeout_s} more"
        for sampler in self.samplers:
            sampler.fail_all(Failed(message, status=503))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), _LAST_WORDS_S)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Keep the server from stopping while a client waits for completions.

        Raises:
            ApiError: the server is stopping.
        """
        if self.stopping.is_set():
            raise self.stopped()
        self._answering += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._answering -= 1
            if not self._answering:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def placed(self, order: CompletionOrder) -> AsyncIterator[Placed]:
        """Give the order to the samplers; at the block's end cancel unfinished samples.

        Raises:
            ApiError: too many wait already, or a sampler is dead.
        """
        if order.scores_prompts:
            await self._compile_scores(order)
        self._check_room(order.num_choices)
        placed, samples = Placed(order), order.fields.n
        # A prompt may have more samples than a replica has slots: replicas share them.
        share = samples if len(self.samplers) == 1 else self.served.slots
        held: list[tuple[SamplingThread, int]] = []
        try:
            if order.scores_prompts:
                self._score(placed, held)
            for place, tokens in enumerate(order.prompts if order.max_tokens else ()):
                values = _samples(order, self.served)
                for start in range(0, samples, share):
                    part = slice(start, start + share)
                    request = Request(
                        request_id=next(self._ids),
                        tokens=tokens,
                        samples=Samples(**{k: v[part] for k, v in values.items()}),
                        sampling=order.sampling,
                        stop=tuple(order.fields.stop),
                    )
                    first = place * samples + start
                    deliver = functools.partial(self._deliver, placed, first)
                    sampler = self._least_busy()
                    if not sampler.submit(request, deliver, stream=order.fields.stream):
                        raise ApiError("the sampler died", status=500)
                    held.append((sampler, request.request_id))
            self.prompt_tokens += sum(map(len, order.prompts))
            yield placed
        finally:
            for sampler, request_id in held:
                sampler.cancel(request_id)

    async def _compile_scores(self, order: CompletionOrder) -> None:
        """Compile what scoring the prompts needs, while the samplers continue.

        Orders wait in line here: in threads they would take all that parsing has.
        """
        lengths = [len(each) for each in order.prompts]
        for scorer in (sampler.scorer for sampler in self.samplers):
            for tokens in (max(lengths), sum(lengths)):
                if not scorer.has(tokens):
                    async with self._compiling:
                        await asyncio.to_thread(scorer.compile, tokens)

    def _score(self, placed: Placed, held: list[tuple[SamplingThread, int]]) -> None:
        """Ask for the log-probabilities of an order's prompts."""
        order = placed.order
        for place, tokens in enumerate(order.prompts):
            sampler, request_id = self._least_busy(), next(self._ids)
            if not sampler.score(
                request_id,
                ToScore(tokens=tokens, temperature=order.temperature),
                functools.partial(self._deliver_scores, placed, place),
                counted=not order.max_tokens,  # else its completions are
            ):
                raise ApiError("the sampler died", status=500)
            held.append((sampler, request_id))

    def _deliver_scores(self, placed: Placed, place: int, event: Event) -> None:
        self._loop.call_soon_threadsafe(placed.scored.put_nowait, (place, event))

    def _least_busy(self) -> SamplingThread:
        return min(self.samplers, key=lambda each: each.samples)

    def _deliver(self, placed: Placed, first: int, event: Event) -> None:
        """Hand an event to the loop; `first` is the place of the sample numbered 0."""
        self._loop.call_soon_threadsafe(self._take, placed, first, event)

    def _take(self, placed: Placed, first: int, event: Event) -> None:
        if isinstance(event, Completion):
            self.completion_tokens += len(event.tokens)
        placed.events.put_nowait((first, event))

    def _check_room(self, samples: int) -> None:
        most = self.served.max_waiting
        if self.running + self.waiting + samples > self.slots + most:
            raise ApiError(
                f"{self.waiting} completions wait for a slot and these are {samples} "
                f"more; the limit is --max_waiting = {most}: try again later",
                status=429,
                code="too_many_requests",
            )


def _samples(order: CompletionOrder, served: Served) -> dict[str, Any]:
    """Return the fields of a prompt's `Samples`.

    Equal seeds and prompts give equal keys, whatever else the order asks for.
    """
    count, seed = order.fields.n, order.fields.seed
    seed = secrets.randbits(32) if seed is None else seed
    return {
        "keys": _make_keys(seed, served)[:count],
        "thinking_limits": np.full(count, NEVER, np.int32),
        "max_tokens": np.full(count, order.max_tokens, np.int32),
    }


def _make_keys(seed: int, served: Served) -> np.ndarray:
    """Return keys of the most samples there may be: each number has a program."""
    count = served.max_samples
    return sample_keys(seed, "serve", prompt_id=0, epoch=0, num_samples=count)
