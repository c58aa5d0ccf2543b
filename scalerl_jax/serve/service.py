"""Orders shared out to replicas of the sampler, and their events given back.

A `Service` lives on the event loop.  Each replica has a thread that owns its sampler:
all that the sampler is told comes through one queue, and what it answers is handed to
a function of the request, called in that thread, which passes it to the loop.  When a
thread dies, every open request hears of it, and later ones are refused.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import queue
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np

from scalerl_jax.sampler.decoding import NEVER
from scalerl_jax.sampler.protocol import Driver, Sampler
from scalerl_jax.sampler.requests import Completion, Request, Samples
from scalerl_jax.sampler.sampling import sample_keys
from scalerl_jax.serve.fields import ApiError
from scalerl_jax.serve.orders import CompletionOrder, Served

_LAST_WORDS_S = 2.0  # to write answers that are already known
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """Tokens that a sample of a request has grown by."""

    sample: int
    tokens: np.ndarray  # int32 [n]


@dataclasses.dataclass(frozen=True)
class Failed:
    """The request, or one sample of it, cannot be completed."""

    message: str
    status: int  # of HTTP


Event = NewTokens | Completion | Failed


@dataclasses.dataclass(kw_only=True)
class _Open:
    deliver: Callable[[Event], None]
    samples_left: int


class SamplingThread:
    """Runs a sampler that has its params loaded.

    `samples` (of open requests, not finished), `stats` (the sampler's counts, as of its
    last step) and `failure` (what the thread died of) may be read in any thread.
    """

    def __init__(self, sampler: Sampler, *, on_death: Callable[[], None]) -> None:
        """Make, not start; `on_death` is called in the thread, once everyone knows."""
        self._driver = Driver(sampler)
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the next three
        self._open: dict[int, _Open] = {}
        self.samples = 0
        self.failure: BaseException | None = None
        self.stats = dataclasses.replace(sampler.stats)
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End after the step that is running; open requests hear nothing more."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("the sampler is still busy after %s s", timeout_s)

    def submit(
        self, request: Request, deliver: Callable[[Event], None], *, stream: bool
    ) -> bool:
        """Put a request in line, its `request_id` new; False: the thread is dead.

        With `stream` it hears of tokens too, not of completions alone.
        """
        with self._lock:
            if self.failure is not None:
                return False
            self._open[request.request_id] = _Open(
                deliver=deliver, samples_left=request.num_samples
            )
            self.samples += request.num_samples
        self._inbox.put(functools.partial(self._submit, request, stream))
        return True

    def cancel(self, request_id: int) -> None:
        """Give up a request, if it is still open; it hears nothing more."""
        self._inbox.put(functools.partial(self._cancel, request_id))

    def fail_all(self, failed: Failed) -> None:
        """Give up every request that is open when this comes to pass."""
        self._inbox.put(functools.partial(self._fail_all, failed))

    # -- in the thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._obey():
                self._hand_out(self._driver.step())
        except BaseException as failure:  # noqa: BLE001  handed to all who wait
            _log.error("the sampler died", exc_info=failure)
            with self._lock:
                self.failure = failure
                abandoned = list(self._open.values())
                self._open.clear()
                self.samples = 0
            for each in abandoned:
                each.deliver(Failed(f"the sampler died: {failure!r}", status=500))
            self._on_death()

    def _obey(self) -> bool:
        """Do as the queue says, waiting only if nothing is sampled; False: end."""
        while True:
            try:
                command = self._inbox.get(block=not self._driver.sampler.busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _hand_out(self, completions: list[Completion]) -> None:
        """Deliver what has ended to whoever still wants it."""
        for completion in completions:
            with self._lock:
                request = self._open.get(completion.request_id)
                if request is None:
                    continue
                request.samples_left -= 1
                self.samples -= 1
                if not request.samples_left:
                    del self._open[completion.request_id]
            request.deliver(completion)
        self.stats = dataclasses.replace(self._driver.sampler.stats)

    def _submit(self, request: Request, stream: bool) -> None:
        opened = self._open.get(request.request_id)
        if opened is None:  # given up before it began
            return

        def listen(sample: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
            opened.deliver(NewTokens(sample, tokens))

        listener = listen if stream else None
        try:
            self._driver.sampler.submit(dataclasses.replace(request, listener=listener))
        except ValueError as error:  # the sampler takes no such request
            self._close(request.request_id)
            opened.deliver(Failed(str(error), status=400))

    def _cancel(self, request_id: int) -> None:
        if self._close(request_id):
            self._driver.sampler.cancel(request_id)
            self.stats = dataclasses.replace(self._driver.sampler.stats)

    def _fail_all(self, failed: Failed) -> None:
        for request_id, opened in list(self._open.items()):
            self._cancel(request_id)
            opened.deliver(failed)

    def _close(self, request_id: int) -> bool:
        with self._lock:
            closed = self._open.pop(request_id, None)
            if closed is not None:
                self.samples -= closed.samples_left
            return closed is not None


class Placed:
    """An order on its way: events of its samples, by the place of the first of them."""

    def __init__(self, order: CompletionOrder) -> None:
        """Make the order's queue of events, empty."""
        self.order = order
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    async def next(self) -> tuple[int, NewTokens | Completion]:
        """Return the place of a choice and the next event of it.

        Raises:
            ApiError: a completion failed, or can no longer come.
        """
        first, event = await self.events.get()
        if isinstance(event, Failed):
            raise ApiError(event.message, status=event.status)
        if isinstance(event, Completion) and event.failure:
            raise ApiError(event.failure, status=500, code="sampling_failed")
        return first + event.sample, event


class Service:
    """Admits orders, as long as the server is not stopping."""

    def __init__(self, served: Served, samplers: Sequence[SamplingThread]) -> None:
        """Make it on the event loop that it will live on; a sampler per replica."""
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
    def running(self) -> int:
        """Completions in slots, or about to be, of all replicas."""
        return sum(min(each.samples, self.served.slots) for each in self.samplers)

    @property
    def waiting(self) -> int:
        """Completions that no slot is free for, of all replicas."""
        return sum(max(0, each.samples - self.served.slots) for each in self.samplers)

    @property
    def slots(self) -> int:
        """Completions that all replicas sample together."""
        return self.served.slots * len(self.samplers)

    def count(self, name: str) -> int:
        """Return the sum of a count of the replicas' samplers."""
        return sum(getattr(each.stats, name) for each in self.samplers)

    def stopped(self) -> ApiError:
        """Return the refusal of who comes while the server is stopping."""
        return ApiError("the server is stopping", status=503, code="stopping")

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
        """Give the order to the samplers; on leaving, give up what is not finished.

        Raises:
            ApiError: too many wait already, or a sampler is dead.
        """
        self._check_room(order.num_choices)
        placed, samples = Placed(order), order.fields.n
        # One prompt may have more samples than a replica has slots: they are shared.
        share = samples if len(self.samplers) == 1 else self.served.slots
        held: list[tuple[SamplingThread, int]] = []
        try:
            for place, tokens in enumerate(order.prompts):
                values = _samples(order)
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
                    sampler = min(self.samplers, key=lambda each: each.samples)
                    if not sampler.submit(request, deliver, stream=order.fields.stream):
                        raise ApiError("the sampler died", status=500)
                    held.append((sampler, request.request_id))
            self.prompt_tokens += sum(map(len, order.prompts))
            yield placed
        finally:
            for sampler, request_id in held:
                sampler.cancel(request_id)

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


def _samples(order: CompletionOrder) -> dict[str, Any]:
    """Return the fields of a prompt's `Samples`.

    The same seed and prompt give the same keys, whatever else is asked for.
    """
    count, seed = order.fields.n, order.fields.seed
    seed = secrets.randbits(32) if seed is None else seed
    return {
        "keys": sample_keys(seed, "serve", prompt_id=0, epoch=0, num_samples=count),
        "thinking_limits": np.full(count, NEVER, np.int32),
        "max_tokens": np.full(count, order.max_tokens, np.int32),
    }
