"""Transfer of published params into a replica of one process or of several.

In a replica of several processes no device gets a version before every process holds it
on its host, so that a version that one process cannot get changes nothing anywhere.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax.numpy as jnp

from scalerl_jax.sampler.lockstep import Call, Followed, LeadingEngine
from scalerl_jax.types import PyTree
from scalerl_jax.weights.channels import Channel, Parcel, Reference
from scalerl_jax.weights.manifest import Publication
from scalerl_jax.weights.publication import Published
from scalerl_jax.weights.receiving import NotReceivedError, Receiver

# handles -> context manager in which the channel can use them
Reaching = Callable[[Mapping[Reference, Any]], contextlib.AbstractContextManager[None]]
# old params, deleted to make room, or None -> params on the devices
LayOut = Callable[[PyTree | None], PyTree]
_Bits = tuple[int, list[int]]  # a version, and the checksums of its shards


class PublishedFrom:
    """Makes params of parcels, in which a learner's processes offer their shards."""

    def __init__(
        self,
        channel: Channel,
        abstract: PyTree,
        *,
        reaching: Reaching = lambda handles: contextlib.nullcontext(),
        in_place: bool = False,
    ) -> None:
        """Fetch over this channel params like `abstract`, which has shardings.

        With `in_place` the devices hold only one version, that of `replacing`.
        """
        self._reaching = reaching
        self.in_place = in_place
        self.receiver = Receiver(channel, abstract)
        # Receives pinned versions, which are no base of a delta.
        self._apart = Receiver(channel, abstract, keep_base=False)
        self._newest: tuple[_Bits, Published] | None = None
        self._pinned: tuple[_Bits, Published] | None = None

    def __call__(self, parcel: Parcel) -> Published:
        """Return the params of a publication; params already held are not fetched.

        Raises:
            NotReceivedError: it did not arrive whole; the params before stay.
        """
        publication = Publication.from_json(parcel.text)
        held = self._newest
        if held is not None and held[0] == _bits(publication):
            return held[1]
        if self.in_place:
            raise NotReceivedError(
                f"version {publication.policy_version} is asked for, and with "
                f"generators.versions = 1 none is there but "
                f"{self.receiver.policy_version}"
            )
        return self.replacing(parcel)()

    def replacing(self, parcel: Parcel) -> Callable[[], Published]:
        """Fetch a publication; return a function that puts it on the devices.

        With `in_place` that function deletes the params before.

        Raises:
            NotReceivedError: it did not arrive whole; the params before stay.
        """
        publication = Publication.from_json(parcel.text)
        bits, held = _bits(publication), self._newest
        if held is not None and held[0] == bits:
            return lambda: held[1]
        lay_out = self.fetch(parcel)

        def replace() -> Published:
            before = None
            if self.in_place and self._newest is not None:
                before, self._newest = self._newest[1].params, None
            self._newest = bits, _published(lay_out(before), publication)
            return self._newest[1]

        return replace

    def pinned(self, parcel: Parcel) -> Published:
        """Return the params of a publication that may be older, held until `release`.

        Raises:
            NotReceivedError: they did not arrive whole.
        """
        publication = Publication.from_json(parcel.text)
        bits, held = _bits(publication), self._newest
        if self._pinned is None or self._pinned[0] != bits:
            self._pinned = None  # at most one is held
            if held is not None and held[0] == bits:
                self._pinned = held
            else:
                params = self.fetch(parcel, apart=True)(None)
                self._pinned = bits, _published(params, publication)
        return self._pinned[1]

    def release(self) -> None:
        """Hold no pinned params any more."""
        self._pinned = None

    def fetch(self, parcel: Parcel, *, apart: bool = False) -> LayOut:
        """Fetch a publication to the host; return a function that lays it out.

        Args:
            parcel: the publication.
            apart: it is neither a delta nor the base of the next one.

        Raises:
            NotReceivedError: what was received before stays as it is.
        """
        receiver = self._apart if apart else self.receiver
        with self._reaching(parcel.handles):
            fetched = receiver.fetch(Publication.from_json(parcel.text))
        return lambda before: receiver.lay_out(fetched, instead_of=before)


class Followers(Protocol):
    """The other processes of a replica, as the one that leads reaches them."""

    def tell(self, call: Call) -> None:
        """Have each make a call of the engine, after those before it; do not wait."""
        ...

    def ask(
        self, method: str, *arguments: Any, in_order: bool = False
    ) -> Callable[[], None]:
        """Have each call a method of its `Follower`; return a function that waits.

        `in_order` puts the call behind the engine calls told before; else it runs
        beside them.  The returned function raises the error of a follower that failed.
        """
        ...


class PublishedToAll(PublishedFrom):
    """The `PublishedFrom` of a leader, whose followers take each version too."""

    def __init__(
        self,
        channel: Channel,
        abstract: PyTree,
        *,
        engine: LeadingEngine,
        followers: Followers,
        **how: Any,
    ) -> None:
        """Fetch together with the followers of `engine`; `how` is as in the base."""
        super().__init__(channel, abstract, **how)
        self._engine, self._followers = engine, followers

    def fetch(self, parcel: Parcel, *, apart: bool = False) -> LayOut:
        """Fetch as `PublishedFrom` does, and return once all have fetched it."""
        others = self._followers.ask("fetch", parcel, apart)
        own = super().fetch(parcel, apart=apart)
        others()

        def lay_out(before: PyTree | None) -> PyTree:
            # Followers first delete the params that were deleted here.
            self._followers.ask("obey", self._engine.let_go(), in_order=True)()
            number = self._engine.new_number()
            others = self._followers.ask("lay_out", number, in_order=self.in_place)
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
    """A process of a replica that does what the leader does, one thing at a time.

    Its methods are those that `Followers.ask` names.
    """

    def __init__(self, followed: Followed, source: PublishedFrom) -> None:
        """Make the leader's calls on `followed`, with params from `source`."""
        self._followed, self._source = followed, source
        self._fetched: LayOut | None = None
        self._newest: PyTree | None = None  # held only with `in_place`

    def obey(self, call: Call) -> None:
        """Make a call of the leader's engine."""
        self._followed.obey(call)

    def fetch(self, parcel: Parcel, apart: bool) -> None:
        """Fetch a publication to this host.

        Raises:
            NotReceivedError: what was received before stays as it is.
        """
        self._fetched = None
        self._fetched = self._source.fetch(parcel, apart=apart)

    def lay_out(self, number: int) -> None:
        """Put the last fetched params on the devices, under this number."""
        assert self._fetched is not None, "the leader has all fetch first"
        lay_out, self._fetched = self._fetched, None
        params = lay_out(self._newest)
        if self._source.in_place:
            self._newest = params
        self._followed.know(params, number)


def _bits(publication: Publication) -> _Bits:
    """Return a key that two publications share only if their bits are equal.

    A restored learner may publish the same version again with other bits.
    """
    sums = [shard.crc32 for _, shard in publication.shards]
    return publication.policy_version, sums


def _published(params: PyTree, publication: Publication) -> Published:
    version = jnp.int32(publication.policy_version)
    return Published(params=params, policy_version=version, checksums=None)
