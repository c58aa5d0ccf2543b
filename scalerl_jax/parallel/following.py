"""Params that are fetched beside the sampling, and swapped in between two calls.

A thread receives one version after the other.  A version that does not arrive is no
failure of the replica: it goes on with the one before, and says that it needs a full
one, as later deltas are against a version that it does not hold.
"""

import collections
import logging
import threading
import time

from scalerl_jax.parallel.offers import Publication
from scalerl_jax.parallel.receiving import NotReceivedError, Receiver
from scalerl_jax.types import PyTree

_log = logging.getLogger(__name__)


class Follower:
    """Receives what is published, in order, and holds the newest for who samples.

    At most two versions are on the devices: the one in use and the next one.  The one
    after that is begun when the sampling thread has asked for the next.
    """

    def __init__(self, receiver: Receiver, *, timeout_s: float = 600.0) -> None:
        """Start the thread; `timeout_s` is for all objects of one version."""
        self._receiver = receiver
        self._timeout_s = timeout_s
        self._waiting: collections.deque[Publication] = collections.deque()
        self._ready: tuple[PyTree, int] | None = None
        self._used: tuple[PyTree, int] | None = None
        self._failure: BaseException | None = None
        self._refusal: NotReceivedError | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def follow(self, publication: Publication) -> None:
        """Have a version fetched after those before it; returns at once.

        One that is full makes those that wait superfluous.
        """
        with self._changed:
            if publication.base_version is None:
                self._waiting.clear()
            self._waiting.append(publication)
            self._changed.notify_all()

    def newest(self) -> tuple[PyTree, int] | None:
        """Return the params for the next call, and their version; None: none came yet.

        For the thread that samples: the version returned is the one in use from now on.

        Raises:
            BaseException: what ended the thread that fetches.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if self._ready is not None:
                self._used, self._ready = self._ready, None
                self._changed.notify_all()
            return self._used

    def wait(self, timeout_s: float) -> bool:
        """Wait until `newest` has something new; return whether it has."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._ready is not None or self._failure is not None, timeout_s
            )

    @property
    def used_version(self) -> int | None:
        """The version that `newest` has returned last."""
        with self._changed:
            return None if self._used is None else self._used[1]

    @property
    def needs_full(self) -> bool:
        """Return whether no delta that is published from now on can be received."""
        return self.refusal is not None

    @property
    def refusal(self) -> NotReceivedError | None:
        """The error of the last version, which did not arrive; None: it did."""
        with self._changed:
            return self._refusal

    def stop(self, timeout_s: float) -> None:
        """End the thread; a version that is being fetched may still arrive, unseen.

        Raises:
            TimeoutError: it did not end in time.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the thread that fetches weights did not end within {timeout_s:g} s"
            )

    # -- in the thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (publication := self._next()) is not None:
                self._receive(publication)
        except BaseException as failure:  # noqa: BLE001  raised again by newest()
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _next(self) -> Publication | None:
        """The version to fetch, once the one before is in use; None: it is over."""
        with self._changed:  # without a limit: `stop` ends it
            self._changed.wait_for(
                lambda: self._stopped or (self._waiting and self._ready is None)
            )
            return None if self._stopped else self._waiting.popleft()

    def _receive(self, publication: Publication) -> None:
        if self._receiver.holds(publication):  # it is offered once more, for others
            return
        began = time.perf_counter()
        try:
            params = self._receiver.receive(publication, timeout_s=self._timeout_s)
        except NotReceivedError as refusal:
            _log.warning("%s", refusal)
            with self._changed:
                self._refusal = refusal
            return
        version = publication.policy_version
        _log.info("version %d came in %.2f s", version, time.perf_counter() - began)
        with self._changed:
            self._refusal = None
            self._ready = (params, version)
            self._changed.notify_all()
