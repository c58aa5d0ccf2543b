"""Transfer of published params into a replica of several processes.

No device gets a version before every process holds it on its host: if one process
cannot fetch a version, none uses it.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from scalerl_jax.sampler.lockstep import EngineCall, Followed, LeadingEngine
from scalerl_jax.types import PyTree
from scalerl_jax.weights.channels import Channel
from scalerl_jax.weights.manifest import Manifest
from scalerl_jax.weights.receiving import LayOut, PublishedFrom


class Followers(Protocol):
    """The leader's connection to the other processes of its replica."""

    def tell(self, call: EngineCall) -> None:
        """Send a call of the engine to each, in order; do not wait."""
        ...

    def ask(
        self, method: str, *arguments: Any, in_order: bool = False
    ) -> Callable[[], None]:
        """Call a method of each process's `Follower`; return a function that waits.

        With `in_order` the call runs after the engine calls sent before; else it runs
        concurrently.  The returned function raises the error of a follower that failed.
        """
        ...


class PublishedToAll(PublishedFrom):
    """The `PublishedFrom` of a leader, whose followers fetch each version, too."""

    def __init__(
        self,
        channel: Channel,
        abstract: PyTree,
        *,
        engine: LeadingEngine,
        followers: Followers,
        **how: Any,
    ) -> None:
        """Fetch together with the followers of `engine`; `how`: as in the base."""
        super().__init__(channel, abstract, **how)
        self._engine, self._followers = engine, followers

    def fetch(self, manifest: Manifest, *, apart: bool = False) -> LayOut:
        """Fetch as `PublishedFrom` does; return once all processes have fetched."""
        others = self._followers.ask("fetch", manifest, apart)
        own = super().fetch(manifest, apart=apart)
        others()

        def lay_out(before: PyTree | None) -> PyTree:
            # Followers first delete the params that the leader has deleted.
            self._followers.ask("obey", self._engine.let_go(), in_order=True)()
            number = self._engine.new_number()
            # In place only after the engine's calls with the params that go.
            in_order = self.in_place and not apart
            others = self._followers.ask("lay_out", number, in_order=in_order)
            try:
                params = own(before)
                others()
            except BaseException:
                with contextlib.suppress(Exception):
                    others()  # wait: followers may still be laying the params out
                self._engine.forget(number)
                raise
            self._engine.know(params, number)
            return params

        return lay_out


class Follower:
    """A process of a replica that repeats the leader's calls, one at a time.

    `Followers.ask` names its methods.
    """

    def __init__(self, followed: Followed, source: PublishedFrom) -> None:
        """Repeat the leader's calls on `followed`, with params from `source`."""
        self._followed, self._source = followed, source
        self._fetched: LayOut | None = None
        self._apart = False  # the fetched version replaces no other one
        self._newest: PyTree | None = None  # held only with `in_place`

    def obey(self, call: EngineCall) -> None:
        """Make a call of the leader's engine."""
        self._followed.obey(call)

    def fetch(self, manifest: Manifest, apart: bool) -> None:
        """Fetch a version to this host.

        Raises:
            NotReceivedError: the params received before are unchanged.
        """
        self._fetched = None
        self._fetched = self._source.fetch(manifest, apart=apart)
        self._apart = apart

    def lay_out(self, number: int) -> None:
        """Put the last fetched params on the devices, under this number."""
        assert self._fetched is not None, "the leader waits until all have fetched"
        lay_out, self._fetched = self._fetched, None
        params = lay_out(None if self._apart else self._newest)
        if self._source.in_place and not self._apart:
            self._newest = params
        self._followed.know(params, number)
