"""Orders into requests of the sampler, and their events into choices.

Lives on the event loop; the sampler's events reach it there.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import secrets
from collections.abc import AsyncIterator, Iterator

import numpy as np

from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.sampler.decoding import NEVER
from scalerl_jax.sampler.requests import Completion, Request, Samples
from scalerl_jax.sampler.sampling import sample_keys
from scalerl_jax.serve.protocol import ApiError, Limits, Order
from scalerl_jax.serve.sampling_thread import Event, Failed, SamplingThread, Tokens

_LAST_WORDS_S = 2.0  # to write answers that are already known


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What this server says about itself."""

    name: str  # of the model
    policy_version: int
    tokenizer: Tokenizer
    limits: Limits
    slots: int
    max_waiting: int  # samples beyond those in slots


class Service:
    """Admits orders, as long as the server is not stopping."""

    def __init__(self, served: Served, sampler: SamplingThread) -> None:
        """Made on the event loop that it will live on."""
        self.served = served
        self.sampler = sampler
        self.stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._answering = 0
        self._ids = itertools.count()

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
        self.sampler.fail_all(Failed(message, status=503))
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
        """The order with the sampler; on leaving, what is not finished is given up.

        Raises:
            ApiError: too many wait already, or the sampler is dead.
        """
        self._check_room(len(order.prompts) * order.num_samples)
        placed = Placed(order)
        try:
            for place, tokens in enumerate(order.prompts):
                request_id = next(self._ids)
                request = _make_request(request_id, tokens, order)
                deliver = functools.partial(self._deliver, placed, place)
                if not self.sampler.submit(request, deliver, stream=order.stream):
                    raise ApiError("the sampler died", status=500)
                placed.request_ids.append(request_id)
            yield placed
        finally:
            for request_id in placed.request_ids:
                self.sampler.cancel(request_id)

    def _deliver(self, placed: "Placed", place: int, event: Event) -> None:
        self._loop.call_soon_threadsafe(placed.events.put_nowait, (place, event))

    def _check_room(self, samples: int) -> None:
        load, served = self.sampler.load, self.served
        room = served.slots + served.max_waiting - load.running - load.waiting
        if samples > room:
            raise ApiError(
                f"{load.waiting} completions wait for a slot and these are {samples} "
                f"more; the limit is --max_waiting = {served.max_waiting}: try again "
                f"later",
                status=429,
                code="too_many_requests",
            )


class Placed:
    """An order on its way: events of its prompts, by their place."""

    def __init__(self, order: Order) -> None:
        """Nothing has come yet."""
        self.order = order
        self.request_ids: list[int] = []
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    @property
    def num_choices(self) -> int:
        """Completions asked for."""
        return len(self.order.prompts) * self.order.num_samples

    async def next(self) -> tuple[int, Tokens | Completion]:
        """The next event, with the place of its choice.

        Raises:
            ApiError: a completion failed, or can no longer come.
        """
        prompt, event = await self.events.get()
        if isinstance(event, Failed):
            raise ApiError(event.message, status=event.status)
        if isinstance(event, Completion) and event.failure:
            raise ApiError(event.failure, status=500, code="sampling_failed")
        return prompt * self.order.num_samples + event.sample, event


def _make_request(request_id: int, tokens: np.ndarray, order: Order) -> Request:
    """The same seed and prompt give the same keys, whatever else is asked for."""
    count = order.num_samples
    seed = secrets.randbits(32) if order.seed is None else order.seed
    return Request(
        request_id=request_id,
        tokens=tokens,
        samples=Samples(
            keys=sample_keys(seed, "serve", prompt_id=0, epoch=0, num_samples=count),
            thinking_limits=np.full(count, NEVER, np.int32),
            max_tokens=np.full(count, order.max_tokens, np.int32),
        ),
        sampling=order.sampling,
        stop=order.stop,
    )
