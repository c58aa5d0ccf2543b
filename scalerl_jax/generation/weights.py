"""Published params on their way into a replica, of one process or of several.

Of several all have a version on their hosts before any lays it out on its devices, so
that a version that one of them cannot get changes nothing in any.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax.numpy as jnp

from scalerl_jax.parallel.channels import Channel, Parcel, Reference
from scalerl_jax.parallel.offers import Publication
from scalerl_jax.parallel.publication import Published
from scalerl_jax.parallel.receiving import NotReceivedError, Receiver
from scalerl_jax.sampler.lockstep import Call, Followed, LeadingEngine
from scalerl_jax.types import PyTree

# Has a channel reach what it needs handles for, while a block runs.
Reaching = Callable[[Mapping[Reference, Any]], contextlib.AbstractContextManager[None]]
# Puts params on the devices; those it is given make room for them.
LayOut = Callable[[PyTree | None], PyTree]
_Bits = tuple[int, list[int]]  # a version, and the checksums of its shards


class PublishedFrom:
    """Makes params of the parcels in which a learner's processes offer them."""

    def __init__(
        self,
        channel: Channel,
        abstract: PyTree,
        *,
        reaching: Reaching = lambda handles: contextlib.nullcontext(),
        in_place: bool = False,
    ) -> None:
        """Fetch over this channel; arguments are those of a `Receiver`.

        With `in_place` there is only one version at a time, that of `replacing`.
        """
        self._reaching = reaching
        self.in_place = in_place
        self.receiver = Receiver(channel, abstract)
        # Of versions that the next one does not follow on.
        self._apart = Receiver(channel, abstract, keep_base=False)
        self._newest: tuple[_Bits, Published] | None = None
        self._pinned: tuple[_Bits, Published] | None = None

    def __call__(self, parcel: Parcel) -> Published:
        """Return the params of a publication; those held are not fetched again.

        Raises:
            NotReceivedError: what was received before stays as it is.
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
        """Return what puts a publication on the devices, once it is fetched.

        With `in_place` it takes the place of the last.

        Raises:
            NotReceivedError: what was received before stays as it is.
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
            NotReceivedError: they cannot be had.
        """
        publication = Publication.from_json(parcel.text)
        bits, held = _bits(publication), self._newest
        if self._pinned is None or self._pinned[0] != bits:
            self._pinned = None  # no two at a time
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
        """Fetch a publication to the host; return what lays it out.

        Args:
            parcel: the publication.
            apart: it is neither the base of the next nor against the one before.

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
        """Have each do something, and return what waits until all have.

        `in_order` puts it behind the calls of the engine that were told before; else
        it is done beside them.  What is returned raises the error of one that failed.
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
        """Fetch beside the followers, for the engine that they follow."""
        super().__init__(channel, abstract, **how)
        self._engine, self._followers = engine, followers

    def fetch(self, parcel: Parcel, *, apart: bool = False) -> LayOut:
        """Fetch as `PublishedFrom` does, and return once all have fetched it."""
        others = self._followers.ask("fetch", parcel, apart)
        own = super().fetch(parcel, apart=apart)
        others()

        def lay_out(before: PyTree | None) -> PyTree:
            # What has made room here does so there first.
            self._followers.ask("obey", self._engine.let_go(), in_order=True)()
            number = self._engine.new_number()
            others = self._followers.ask("lay_out", number, in_order=self.in_place)
            try:
                params = own(before)
                others()
            except BaseException:
                with contextlib.suppress(Exception):
                    others()  # which may still be at it, and know it after
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
        """Make these calls, with params of this source."""
        self._followed, self._source = followed, source
        self._fetched: LayOut | None = None
        self._newest: PyTree | None = None  # with `in_place`

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
        """Put what was fetched last on the devices, as params of this number."""
        assert self._fetched is not None, "the leader has all fetch first"
        lay_out, self._fetched = self._fetched, None
        params = lay_out(self._newest)
        if self._source.in_place:
            self._newest = params
        self._followed.know(params, number)


def _bits(publication: Publication) -> _Bits:
    """Return what two publications of the same bits have in common.

    A learner that was restored publishes versions again, perhaps with other bits.
    """
    sums = [shard.crc32 for _, shard in publication.shards]
    return publication.policy_version, sums


def _published(params: PyTree, publication: Publication) -> Published:
    version = jnp.int32(publication.policy_version)
    return Published(params=params, policy_version=version, checksums=None)
