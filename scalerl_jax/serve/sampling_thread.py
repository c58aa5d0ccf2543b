"""The thread that owns a scheduler: requests in, tokens and completions out.

Everything that the scheduler is told comes through one queue, and what it answers is
handed to a function of the request, called in this thread.  When the thread dies,
every open request hears of it, and later ones are refused.
"""

import contextlib
import dataclasses
import functools
import logging
import queue
import threading
from collections.abc import Callable

import numpy as np

from scalerl_jax.generation.service import turns
from scalerl_jax.sampler.requests import Completion, Request
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.types import PyTree

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens that a sample of a request has grown by."""

    sample: int
    tokens: np.ndarray  # int32 [n]


@dataclasses.dataclass(frozen=True)
class Failed:
    """The request, or one sample of it, cannot be completed."""

    message: str
    status: int  # of HTTP


Event = Tokens | Completion | Failed


@dataclasses.dataclass(kw_only=True)
class _Open:
    deliver: Callable[[Event], None]
    samples_left: int


class SamplingThread:
    """Runs a scheduler on params of one version.

    `samples` (of open requests, not finished), `stats` (the scheduler's counts, as of
    its last step) and `failure` (what the thread died of) may be read in any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        params: PyTree,
        *,
        version: int,
        on_death: Callable[[], None],
    ) -> None:
        """Make, not start; `on_death` is called in the thread, once everyone knows."""
        self._scheduler = scheduler
        self._params = params
        self._version = version
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the next three
        self._open: dict[int, _Open] = {}
        self.samples = 0
        self.failure: BaseException | None = None
        self.stats = dataclasses.replace(scheduler.stats)
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
            for _ in turns(
                self._scheduler, self, lambda: (self._params, self._version)
            ):
                pass
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

    def fill(self, scheduler: Scheduler, version: int) -> bool:
        """Do as the queue says, waiting only where there is nothing to sample."""
        while True:
            try:
                command = self._inbox.get(block=not scheduler.busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def sampling(self) -> contextlib.AbstractContextManager[None]:
        """Return nothing that surrounds a step."""
        return contextlib.nullcontext()

    def ended(self, completions: list[Completion], version: int) -> None:
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
        self.stats = dataclasses.replace(self._scheduler.stats)

    def rest(self, *, sampled: bool) -> None:
        """Go on at once: `fill` waits."""

    def _submit(self, request: Request, stream: bool) -> None:
        opened = self._open.get(request.request_id)
        if opened is None:  # given up before it began
            return

        def listen(sample: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
            opened.deliver(Tokens(sample, tokens))

        listener = listen if stream else None
        try:
            self._scheduler.submit(dataclasses.replace(request, listener=listener))
        except ValueError as error:  # the scheduler takes no such request
            self._close(request.request_id)
            opened.deliver(Failed(str(error), status=400))

    def _cancel(self, request_id: int) -> None:
        if self._close(request_id):
            self._scheduler.cancel(request_id)
            self.stats = dataclasses.replace(self._scheduler.stats)

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
