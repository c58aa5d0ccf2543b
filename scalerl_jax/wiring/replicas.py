"""Build several replicas from a Config, and the controller's side of them."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from scalerl_jax.config import Config
from scalerl_jax.contract import Link
from scalerl_jax.controller.dispatch import Dispatcher
from scalerl_jax.controller.fleet import Fleet
from scalerl_jax.controller.orders import OrderBook
from scalerl_jax.controller.replicas import FleetLimits
from scalerl_jax.environments.verdict import OwnReward
from scalerl_jax.generation.evaluation import summarize
from scalerl_jax.generation.followers import Follower, Followers, PublishedToAll
from scalerl_jax.generation.replica import Replica, ReplicaThread, ThreadLink
from scalerl_jax.generation.replica_orders import ReplicaOrders
from scalerl_jax.learner.publish import make_completion, make_publish, part_dtypes
from scalerl_jax.model.architecture import Architecture, sampler_layout, sampler_mesh
from scalerl_jax.parallel.mesh import Device
from scalerl_jax.planning.memory import publishes_part
from scalerl_jax.run.ledger import Ledger
from scalerl_jax.run.progress import Progress
from scalerl_jax.run.work_log import WorkLog
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.lockstep import Followed, LeadingEngine
from scalerl_jax.types import Prompt, PyTree
from scalerl_jax.weights.channels import Channel
from scalerl_jax.weights.parts import PublishedParts
from scalerl_jax.weights.publication import PublishedToEach, digest_of
from scalerl_jax.weights.receiving import PublishedFrom, Reaching
from scalerl_jax.wiring.devices import generator_pools
from scalerl_jax.wiring.learning import abstract_state, start_frozen
from scalerl_jax.wiring.sampling import (
    GeneratorParts,
    make_checked_tokenizer,
    make_engine,
    make_judging,
    make_thread,
    share_verifiers,
    weights_format,
)


def make_local_fleet(
    parts: GeneratorParts,
    engines: Sequence[Engine],
    orders: OrderBook,
    ledger: Ledger,
    opened: contextlib.ExitStack,
) -> tuple[Fleet, Callable[[], int]]:
    """Return replicas that are threads of this process, each with one of the engines.

    Also return a function that counts their verifiers' restarts; `opened` closes the
    verifiers.
    """
    parts = share_verifiers(parts, len(engines))
    pools = generator_pools(parts.config)
    links = [
        ThreadLink(make_replica(parts, engine, ledger, pool, opened))
        for engine, pool in zip(engines, pools, strict=True)
    ]
    fleet = make_fleet(
        parts,
        orders,
        ledger,
        connect=lambda number: _done(links[number]),
    )
    return fleet, lambda: fleet.verifier_restarts


def make_publish_to_all(
    config: Config, arch: Architecture, learner: Mesh, replicas: Sequence[Mesh]
) -> Callable[[PyTree, Array], PublishedToEach]:
    """Return a function (params, version) -> copies of the params for each replica.

    Replicas that share devices share a copy.
    """
    form = weights_format(config)
    to_mesh = {
        mesh: make_publish(arch, **form, learner_mesh=learner, sampler_mesh=mesh)
        for mesh in dict.fromkeys(replicas)
    }

    def publish(params: PyTree, policy_version: Array) -> PublishedToEach:
        sent = {mesh: to(params, policy_version) for mesh, to in to_mesh.items()}
        return PublishedToEach(tuple(sent[mesh] for mesh in replicas))

    return publish


def make_replica(
    parts: GeneratorParts,
    engine: Engine,
    ledger: Ledger,
    pool: str,
    opened: contextlib.ExitStack,
    **how: Any,
) -> Replica:
    """Return a replica in this process, which does not sample yet.

    `how` are further arguments of `Replica`: the source of params, the log of work.
    """
    orders = ReplicaOrders()
    thread, restarts = make_thread(
        parts, engine, orders, ledger, pool, opened, kind=ReplicaThread
    )
    return Replica(
        thread,
        orders,
        slots=parts.config.sampler.slots,
        group_size=parts.config.batch.group_size,
        verifier_restarts=restarts,
        **how,
    )


def make_remote_replica(
    config: Config,
    arch: Architecture,
    devices: Sequence[Device],
    held_out: Sequence[Prompt],
    own: OwnReward | None,
    channel: Channel,
    opened: contextlib.ExitStack,
    *,
    reaching: Reaching,
    followers: Followers | None = None,
) -> Replica:
    """Return a replica in its own processes, which fetches params from a channel.

    Args:
        config: of the run.
        arch: architecture of the policy.
        devices: devices of all processes of the replica.
        held_out: prompts of the evaluation.
        own: the user's reward functions, from the file that the controller has read.
        channel: transport of published params.
        opened: the stack that closes its verifiers.
        reaching: context manager in which the channel can read parts that need handles.
        followers: the replica's other processes, which this one leads; None: none.
    """
    tokenizer = make_checked_tokenizer(config, arch)
    parts = GeneratorParts(
        config=config,
        tokenizer=tokenizer,
        held_out=held_out,
        own=own,
        progress=Progress(),
    )
    mesh = sampler_mesh(arch, devices)
    if followers is None:
        engine = make_engine(config, arch, tokenizer, mesh)
        source = _source(config, arch, mesh, channel, reaching)
    else:
        engine = make_engine(config, arch, tokenizer, mesh, kind=LeadingEngine)
        engine.lead(followers.tell)
        source = PublishedToAll(
            channel,
            _layout(config, arch, mesh),
            engine=engine,
            followers=followers,
            **_how(config, reaching),
        )
    work = WorkLog("remote")
    return make_replica(parts, engine, work, "remote", opened, fetch=source, work=work)


def make_follower(
    config: Config,
    arch: Architecture,
    devices: Sequence[Device],
    channel: Channel,
    *,
    reaching: Reaching,
) -> Follower:
    """Return a further process of the replica that `make_remote_replica` leads."""
    mesh = sampler_mesh(arch, devices)
    engine = make_engine(config, arch, make_checked_tokenizer(config, arch), mesh)
    layout = _layout(config, arch, mesh)
    source = PublishedFrom(channel, layout, **_how(config, reaching))
    return Follower(Followed(engine), source)


def _source(
    config: Config,
    arch: Architecture,
    mesh: Mesh,
    channel: Channel,
    reaching: Reaching,
) -> PublishedFrom:
    """Return the source of params from the channel, for a replica of one process."""
    how: dict[str, Any] = _how(config, reaching)
    if not publishes_part(config):
        return PublishedFrom(channel, _layout(config, arch, mesh), **how)

    form = weights_format(config)
    trained = abstract_state(config, arch, mesh).params
    layout = jax.tree.map(
        lambda leaf, kind: leaf.update(dtype=kind),
        trained,
        part_dtypes(trained, form["dtype"]),
    )
    frozen = start_frozen(config, arch, mesh)
    return PublishedParts(
        channel,
        layout,
        complete=make_completion(arch, frozen, **form, sampler_mesh=mesh),
        frozen_digest=digest_of(frozen),
        **how,
    )


def _layout(config: Config, arch: Architecture, mesh: Mesh) -> PyTree:
    return sampler_layout(arch, **weights_format(config), mesh=mesh)


def _how(config: Config, reaching: Reaching) -> dict[str, Any]:
    return dict(reaching=reaching, in_place=config.generators.versions == 1)


def make_fleet(
    parts: GeneratorParts,
    orders: OrderBook,
    ledger: Ledger,
    *,
    connect: Callable[[int], Future[Link]],
) -> Fleet:
    """Return the controller's side of the replicas, which start in the background."""
    config = parts.config
    settings = config.generators
    return Fleet(
        make_dispatcher=lambda wake: Dispatcher(
            orders=orders,
            ledger=ledger,
            connect=connect,
            pools=generator_pools(config),
            limits=FleetLimits(
                start_timeout_s=settings.start_timeout_s,
                silence_timeout_s=settings.silence_timeout_s,
                reissue_after_s=settings.reissue_after_s,
                losses=settings.losses,
            ),
            by_ticket=config.queue.max_staleness == config.batch.epochs - 1,
            note=parts.progress.note,
            wake=wake,
        ),
        orders=orders,
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
