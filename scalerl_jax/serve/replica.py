"""A replica's thread: it owns a sampler, and hands its answers to the requests.

Every command for the sampler comes through one queue.  Its answers are handed to a
function of the request, called in that thread.  When a thread dies, every open request
gets the failure, and later requests are refused.
"""

import collections
import dataclasses
import functools
import logging
import queue
import threading
from collections.abc import Callable

import numpy as np

from scalerl_jax.sampler.protocol import Driver, Sampler
from scalerl_jax.sampler.requests import Completion, Request
from scalerl_jax.sampler.scoring import PromptScorer, ScoredTokens, ToScore

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class HttpReplica:
    """A copy of the model, which samples and gives log-probabilities of prompts."""

    sampler: Sampler
    scorer: PromptScorer


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
    code: str | None = None


Event = NewTokens | Completion | ScoredTokens | Failed


@dataclasses.dataclass(kw_only=True)
class _Open:
    deliver: Callable[[Event], None]
    samples_left: int


@dataclasses.dataclass(frozen=True)
class _Scoring:
    request_id: int
    sequence: ToScore


class SamplingThread:
    """Runs a replica whose sampler has its params loaded.

    `samples` (of open requests, not finished), `stats` (the sampler's counts, as of its
    last step) and `failure` (why the thread ended) may be read in any thread.
    """

    def __init__(self, replica: HttpReplica, *, on_death: Callable[[], None]) -> None:
        """Make, not start; a dying thread fails all requests, then calls `on_death`."""
        self._driver = Driver(replica.sampler)
        self.scorer = replica.scorer
        self._scorings: collections.deque[_Scoring] = collections.deque()
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the next three
        self._open: dict[int, _Open] = {}
        self.samples = 0
        self.failure: BaseException | None = None
        self.stats = dataclasses.replace(replica.sampler.stats)
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End after the current step; open requests get no more events."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("the sampler is still busy after %s s", timeout_s)

    def submit(
        self, request: Request, deliver: Callable[[Event], None], *, stream: bool
    ) -> bool:
        """Queue a request with a new `request_id`; False: the thread is dead.

        With `stream` it gets events of new tokens too, not of completions alone.
        """
        command = functools.partial(self._submit, request, stream)
        return self._enter(request.request_id, deliver, request.num_samples, command)

    def score(
        self,
        request_id: int,
        sequence: ToScore,
        deliver: Callable[[Event], None],
        *,
        counted: bool,
    ) -> bool:
        """Queue a sequence for its log-probabilities; False: the thread is dead.

        A `counted` sequence is counted in `samples`.
        """
        command = functools.partial(
            self._scorings.append, _Scoring(request_id, sequence)
        )
        return self._enter(request_id, deliver, int(counted), command)

    def _enter(
        self,
        request_id: int,
        deliver: Callable[[Event], None],
        samples: int,
        command: Callable[[], None],
    ) -> bool:
        with self._lock:
            if self.failure is not None:
                return False
            self._open[request_id] = _Open(deliver=deliver, samples_left=samples)
            self.samples += samples
        self._inbox.put(command)
        return True

    def cancel(self, request_id: int) -> None:
        """Cancel a request, if it is still open; it gets no more events."""
        self._inbox.put(functools.partial(self._cancel, request_id))

    def fail_all(self, failed: Failed) -> None:
        """Fail every request that is open when the thread gets to it."""
        self._inbox.put(functools.partial(self._fail_all, failed))

    # -- in the thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._obey():
                self._hand_out(self._driver.step())
                self._score()
        except BaseException as failure:  # noqa: BLE001  delivered to open requests
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
        """Run the queued commands; wait only if the sampler is idle; False: end."""
        while True:
            busy = self._driver.sampler.busy or bool(self._scorings)
            try:
                command = self._inbox.get(block=not busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _hand_out(self, completions: list[Completion]) -> None:
        """Deliver ended completions to the requests that are still open."""
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

    def _score(self) -> None:
        """Score the sequences next in line, as many as one call takes."""
        taken: list[_Scoring] = []
        left = self.scorer.room
        while self._scorings and len(self._scorings[0].sequence.tokens) <= left:
            scoring = self._scorings.popleft()
            if scoring.request_id in self._open:  # not cancelled meanwhile
                taken.append(scoring)
                left -= len(scoring.sequence.tokens)
        if not taken:
            return
        found = self.scorer([each.sequence for each in taken])
        for scoring, scored in zip(taken, found, strict=True):
            request = self._close(scoring.request_id)
            if request is None:
                continue
            if np.isfinite(scored.logprobs).all():
                request.deliver(scored)
            else:
                message = "log-probabilities of the prompt are not finite"
                request.deliver(Failed(message, status=500, code="sampling_failed"))

    def _submit(self, request: Request, stream: bool) -> None:
        opened = self._open.get(request.request_id)
        if opened is None:  # cancelled before it began
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

    def _close(self, request_id: int) -> _Open | None:
        with self._lock:
            closed = self._open.pop(request_id, None)
            if closed is not None:
                self.samples -= closed.samples_left
            return closed
