"""Orders into requests of the sampler, and their events into choices.

Lives on the event loop; the sampler's events reach it there.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence

import numpy as np

from scalerl_jax.data.chat import ChatTemplate
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.sampler.decoding import NEVER
from scalerl_jax.sampler.requests import Completion, Request, Samples
from scalerl_jax.sampler.sampling import sample_keys
from scalerl_jax.serve.errors import ApiError
from scalerl_jax.serve.orders import Limits, Order
from scalerl_jax.serve.sampling_thread import (
    Event,
    Failed,
    Load,
    SamplingThread,
    Tokens,
)

_LAST_WORDS_S = 2.0  # to write answers that are already known


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What this server says about itself."""

    name: str  # of the model
    policy_version: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    enable_thinking: bool  # in chats, unless a request says otherwise
    limits: Limits
    slots: int  # of each replica
    max_waiting: int  # samples beyond those in slots


class Service:
    """Admits orders, as long as the server is not stopping."""

    def __init__(self, served: Served, samplers: Sequence[SamplingThread]) -> None:
        """Made on the event loop that it will live on; a sampler for each replica."""
        self.served = served
        self.samplers = samplers
        self.stopping = asyncio.Event()
        self.prompt_tokens = 0  # admitted
        self.completion_tokens = 0  # of finished completions
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._answering = 0
        self._ids = itertools.count()

    @property
    def slots(self) -> int:
        """Of all replicas."""
        return self.served.slots * len(self.samplers)

    @property
    def load(self) -> Load:
        """Of all replicas."""
        loads = [each.load for each in self.samplers]
        return Load(
            running=sum(each.running for each in loads),
            waiting=sum(each.waiting for each in loads),
        )

    def stop(self) -> None:
        """Admit no more orders; from any thread, or a signal handler."""
        self._loop.call_soon_threadsafe(self.stopping.set)

    async def drain(self, timeout_s: float) -> None:
        """Return once everyone is answered; who still samples then hears of failure."""
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
        """While a client waits for completions; the server does not stop before.

        Raises:
            ApiError: the server is stopping.
        """
        if self.stopping.is_set():
            raise ApiError("the server is stopping", status=503, code="stopping")
        self._answering += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._answering -= 1
            if not self._answering:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def placed(self, order: Order) -> AsyncIterator["Placed"]:
        """The order with the samplers; on leaving, what is not finished is given up.

        Raises:
            ApiError: too many wait already, or a sampler is dead.
        """
        self._check_room(order.num_choices)
        placed = Placed(order)
        # One prompt may have more samples than a replica has slots: they are shared.
        share = order.num_samples if len(self.samplers) == 1 else self.served.slots
        held: list[tuple[SamplingThread, int]] = []
        try:
            for place, tokens in enumerate(order.prompts):
                samples = _samples(order)
                for start in range(0, order.num_samples, share):
                    sampler, request_id = self._freest(), next(self._ids)
                    request = Request(
                        request_id=request_id,
                        tokens=tokens,
                        samples=_part(samples, slice(start, start + share)),
                        sampling=order.sampling,
                        stop=order.stop,
                    )
                    first = place * order.num_samples + start
                    deliver = functools.partial(self._deliver, placed, first)
                    if not sampler.submit(request, deliver, stream=order.stream):
                        raise ApiError("the sampler died", status=500)
                    held.append((sampler, request_id))
            self.prompt_tokens += sum(map(len, order.prompts))
            yield placed
        finally:
            for sampler, request_id in held:
                sampler.cancel(request_id)

    def _freest(self) -> SamplingThread:
        """The replica with the least to do."""
        return min(self.samplers, key=lambda each: each.load.samples)

    def _deliver(self, placed: "Placed", first: int, event: Event) -> None:
        """Hand an event to the loop; `first` is the place of the sample numbered 0."""
        self._loop.call_soon_threadsafe(self._take, placed, first, event)

    def _take(self, placed: "Placed", first: int, event: Event) -> None:
        if isinstance(event, Completion):
            self.completion_tokens += len(event.tokens)
        placed.events.put_nowait((first, event))

    def _check_room(self, samples: int) -> None:
        load, served = self.load, self.served
        room = self.slots + served.max_waiting - load.running - load.waiting
        if samples > room:
            raise ApiError(
                f"{load.waiting} completions wait for a slot and these are {samples} "
                f"more; the limit is --max_waiting = {served.max_waiting}: try again "
                f"later",
                status=429,
                code="too_many_requests",
            )


class Placed:
    """An order on its way: events of its samples, by the place of the first of them."""

    def __init__(self, order: Order) -> None:
        """Nothing has come yet."""
        self.order = order
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    async def next(self) -> tuple[int, Tokens | Completion]:
        """The next event, with the place of its choice.

        Raises:
            ApiError: a completion failed, or can no longer come.
        """
        first, event = await self.events.get()
        if isinstance(event, Failed):
            raise ApiError(event.message, status=event.status)
        if isinstance(event, Completion) and event.failure:
            raise ApiError(event.failure, status=500, code="sampling_failed")
        return first + event.sample, event


def _samples(order: Order) -> Samples:
    """The same seed and prompt give the same keys, whatever else is asked for."""
    count = order.num_samples
    seed = secrets.randbits(32) if order.seed is None else order.seed
    return Samples(
        keys=sample_keys(seed, "serve", prompt_id=0, epoch=0, num_samples=count),
        thinking_limits=np.full(count, NEVER, np.int32),
        max_tokens=np.full(count, order.max_tokens, np.int32),
    )


def _part(samples: Samples, part: slice) -> Samples:
    """Some of the samples."""
    return Samples(**{name: value[part] for name, value in vars(samples).items()})
