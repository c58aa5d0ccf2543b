"""Several replicas from a Config, and the controller's side of them."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax.numpy as jnp

from scalerl_jax.config import Config
from scalerl_jax.coordination.desk import OrderDesk
from scalerl_jax.coordination.fleet import Fleet
from scalerl_jax.coordination.members import Limits
from scalerl_jax.coordination.roster import Roster
from scalerl_jax.evaluate.evaluation import summarize
from scalerl_jax.exchange import Link
from scalerl_jax.generation.replica import Replica, ThreadLink
from scalerl_jax.generation.replica_desk import ReplicaDesk
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.shardings import sampler_layout, sampler_mesh
from scalerl_jax.parallel.channels import Channel, Parcel, Reference
from scalerl_jax.parallel.mesh import Device
from scalerl_jax.parallel.offers import Publication
from scalerl_jax.parallel.publication import Published, checksums
from scalerl_jax.parallel.receiving import NotReceivedError, Receiver
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.types import Prompt, PyTree
from scalerl_jax.utils.ledger import Ledger
from scalerl_jax.utils.progress import Progress
from scalerl_jax.utils.work_log import Books, WorkLog
from scalerl_jax.wiring.devices import generator_pools
from scalerl_jax.wiring.generators import (
    GeneratorParts,
    make_thread,
    restarts,
    share_verifiers,
)
from scalerl_jax.wiring.sampling import (
    make_checked_tokenizer,
    make_engine,
    make_judging,
)
from scalerl_jax.wiring.tables import DTYPES

# Has a channel reach what it needs handles for, while a block runs.
Reaching = Callable[[Mapping[Reference, Any]], contextlib.AbstractContextManager[None]]


def make_local_fleet(
    parts: GeneratorParts,
    engines: Sequence[Engine],
    desk: OrderDesk,
    ledger: Ledger,
    opened: contextlib.ExitStack,
) -> tuple[Fleet, Callable[[], int]]:
    """Return replicas that are threads of this process, each with one of the engines.

    What comes with them counts their verifiers' restarts; `opened` closes these.
    """
    parts = share_verifiers(parts, len(engines))
    pools = generator_pools(parts.config)
    links = [
        ThreadLink(make_replica(parts, engine, ledger, pool, opened))
        for engine, pool in zip(engines, pools, strict=True)
    ]
    fleet = make_fleet(
        parts,
        desk,
        ledger,
        connect=lambda number: _done(links[number]),
        address=lambda publication, number, held: publication[number],
    )
    return fleet, lambda: fleet.verifier_restarts


def make_replica(
    parts: GeneratorParts,
    engine: Engine,
    books: Books,
    pool: str,
    opened: contextlib.ExitStack,
    **how: Any,
) -> Replica:
    """Return a replica of this process, which samples nothing yet.

    `how` says how it gets its params and reports its work: arguments of `Replica`.
    """
    desk = ReplicaDesk()
    thread, verifiers = make_thread(parts, engine, desk, books, pool, opened)
    return Replica(
        thread,
        desk,
        slots=parts.config.sampler.slots,
        group_size=parts.config.batch.group_size,
        verifier_restarts=lambda: restarts(verifiers),
        **how,
    )


def make_remote_replica(
    config: Config,
    arch: Architecture,
    devices: Sequence[Device],
    held_out: Sequence[Prompt],
    channel: Channel,
    opened: contextlib.ExitStack,
    *,
    reaching: Reaching = lambda handles: contextlib.nullcontext(),
) -> Replica:
    """Return a replica of a process of its own, which takes params from a channel.

    `reaching` has the channel reach what it needs handles for, in a block.

    Its verifiers are closed with `opened`.
    """
    mesh = sampler_mesh(arch, devices)
    tokenizer = make_checked_tokenizer(config, arch)
    parts = GeneratorParts(
        config=config, tokenizer=tokenizer, held_out=held_out, progress=Progress()
    )
    engine = make_engine(config, arch, tokenizer, mesh)
    layout = sampler_layout(arch, dtype=DTYPES[config.model.sampler_dtype], mesh=mesh)
    source = PublishedFrom(
        channel, layout, reaching=reaching, in_place=config.generators.versions == 1
    )
    work = WorkLog()
    return make_replica(parts, engine, work, "remote", opened, fetch=source, work=work)


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
        self._newest: Published | None = None
        self._pinned: tuple[_Bits, Published] | None = None

    def __call__(self, parcel: Parcel) -> Published:
        """Return the params of a publication; those held are not fetched again.

        Raises:
            NotReceivedError: what was received before stays as it is.
        """
        publication = Publication.from_json(parcel.text)
        if self._newest is None or not self.receiver.holds(publication):
            if self.in_place:
                held = self.receiver.policy_version
                raise NotReceivedError(
                    f"version {publication.policy_version} is asked for, and with "
                    f"generators.versions = 1 none is there but {held}"
                )
            with self._reaching(parcel.handles):
                self._newest = _published(
                    self.receiver.receive(publication), publication
                )
        return self._newest

    def replacing(self, parcel: Parcel) -> Callable[[], Published]:
        """Return what puts a publication in the place of the last, once it is fetched.

        Raises:
            NotReceivedError: what was received before stays as it is.
        """
        publication = Publication.from_json(parcel.text)
        newest = self._newest
        if newest is not None and self.receiver.holds(publication):
            return lambda: newest
        with self._reaching(parcel.handles):
            fetched = self.receiver.fetch(publication)

        def replace() -> Published:
            before, self._newest = self._newest, None
            params = self.receiver.lay_out(
                fetched, instead_of=None if before is None else before.params
            )
            self._newest = _published(params, publication)
            return self._newest

        return replace

    def pinned(self, parcel: Parcel) -> Published:
        """Return the params of a publication that may be older, held until `release`.

        Raises:
            NotReceivedError: they cannot be had.
        """
        publication = Publication.from_json(parcel.text)
        sums = [shard.crc32 for _, shard in publication.shards]
        bits = (publication.policy_version, sums)
        if self._pinned is None or self._pinned[0] != bits:
            self._pinned = None  # no two at a time
            if self._newest is not None and self.receiver.holds(publication):
                self._pinned = (bits, self._newest)
            else:
                with self._reaching(parcel.handles):
                    params = self._apart.receive(publication)
                self._pinned = (bits, _published(params, publication))
        return self._pinned[1]

    def release(self) -> None:
        """Hold no pinned params any more."""
        self._pinned = None


def _published(params: PyTree, publication: Publication) -> Published:
    version = jnp.int32(publication.policy_version)
    return Published(
        params=params, policy_version=version, checksums=checksums(params, version)
    )


def make_fleet(
    parts: GeneratorParts,
    desk: OrderDesk,
    ledger: Ledger,
    *,
    connect: Callable[[int], Future[Link]],
    address: Callable[[Any, int, int], Any],
) -> Fleet:
    """Return the controller's side of replicas, which begin to come up."""
    config = parts.config
    settings = config.generators
    return Fleet(
        make_roster=lambda wake: Roster(
            desk=desk,
            ledger=ledger,
            connect=connect,
            pools=generator_pools(config),
            limits=Limits(
                start_timeout_s=settings.start_timeout_s,
                silence_timeout_s=settings.silence_timeout_s,
                reissue_after_s=settings.reissue_after_s,
                losses=settings.losses,
            ),
            address=address,
            by_ticket=config.queue.max_staleness == config.batch.epochs - 1,
            note=parts.progress.note,
            wake=wake,
        ),
        desk=desk,
        summarize=functools.partial(
            summarize,
            judging=make_judging(config, parts.tokenizer),
            samples_per_prompt=config.eval.samples_per_prompt,
            logged_rollouts=config.eval.logged_rollouts,
        ),
        num_held_out=len(parts.held_out),
        job_timeout_s=config.queue.batch_timeout_s,
        progress=parts.progress,
    )


def _done(link: Link) -> Future[Link]:
    future: Future[Link] = Future()
    future.set_result(link)
    return future
