"""Generators from a Config: a sampling thread, or replicas in threads of their own."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from scalerl_jax.config import Config
from scalerl_jax.contract import Desk
from scalerl_jax.coordination.desk import OrderDesk
from scalerl_jax.coordination.fleet import Fleet
from scalerl_jax.coordination.members import Limits
from scalerl_jax.coordination.roster import Roster
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.evaluate.evaluation import summarize
from scalerl_jax.exchange import Link
from scalerl_jax.generation.episodes import Episodes
from scalerl_jax.generation.local import LocalGenerators
from scalerl_jax.generation.replica import Replica, ReplicaDesk, ThreadLink
from scalerl_jax.rewards.named import num_processes
from scalerl_jax.rewards.verifier import VerifierPool
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.types import Prompt
from scalerl_jax.utils.ledger import Ledger
from scalerl_jax.utils.progress import Progress
from scalerl_jax.utils.work_log import Books
from scalerl_jax.wiring.devices import generator_pools
from scalerl_jax.wiring.sampling import (
    make_distribution,
    make_evaluator,
    make_judging,
    make_probe,
    make_training_samples,
)
from scalerl_jax.wiring.verifying import make_verifier

Generators = LocalGenerators | Fleet


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorParts:
    """The ingredients of every replica of a run."""

    config: Config
    tokenizer: Tokenizer
    held_out: Sequence[Prompt]  # evaluated, and some of them compared with the learner
    progress: Progress


def make_generators(
    parts: GeneratorParts,
    engines: Sequence[Engine],
    desk: OrderDesk,
    ledger: Ledger,
    opened: contextlib.ExitStack,
) -> tuple[Generators, Callable[[], int]]:
    """Return the generators, not started, and what counts their verifiers' restarts.

    Verifier processes are closed with `opened`.
    """
    pools = generator_pools(parts.config)
    workers = num_processes(parts.config.reward.num_workers)
    workers = max(workers // len(engines), 1)
    parts.progress.note(
        f"verifier processes: {workers} for training, {workers} for evaluations"
        + (f", of each of {len(engines)} replicas" if len(engines) > 1 else "")
    )
    reward = dataclasses.replace(parts.config.reward, num_workers=workers)
    parts = dataclasses.replace(
        parts, config=dataclasses.replace(parts.config, reward=reward)
    )
    if len(engines) == 1:
        (engine,), (pool,) = engines, pools
        thread, verifiers = make_thread(parts, engine, desk, ledger, pool, opened)
        return thread, lambda: _restarts(verifiers)
    links = [
        ThreadLink(make_replica(parts, engine, ledger, pool, opened))
        for engine, pool in zip(engines, pools, strict=True)
    ]
    fleet = make_fleet(
        parts,
        desk,
        ledger,
        connect=lambda number: _done(links[number]),
        address=lambda publication, number: publication[number],
    )
    return fleet, lambda: fleet.verifier_restarts


def make_thread(
    parts: GeneratorParts,
    engine: Engine,
    desk: Desk,
    books: Books,
    pool: str,
    opened: contextlib.ExitStack,
) -> tuple[LocalGenerators, tuple[VerifierPool, VerifierPool]]:
    """Return a sampling thread, not started, and its verifiers."""
    config, tokenizer, held_out = parts.config, parts.tokenizer, parts.held_out
    verifiers = make_verifier(config, opened), make_verifier(config, opened)
    judging = make_judging(config, tokenizer)
    evaluator = make_evaluator(
        config, engine, held_out, tokenizer, verifiers[1], parts.progress
    )
    generators = LocalGenerators(
        scheduler=Scheduler(engine, kv_on_update=config.sampler.kv_on_update),
        desk=desk,
        episodes=Episodes(verifiers[0], judging.answer),
        judging=judging,
        sampling=make_distribution(config),
        make_samples=make_training_samples(config),
        evaluator=evaluator,
        probe=make_probe(config, engine, held_out),
        ledger=books,
        flops=lambda stats: stats.flops(engine.settings.arch),
        pool=pool,
        group_timeout_s=config.queue.group_timeout_s,
    )
    return generators, verifiers


def make_replica(
    parts: GeneratorParts,
    engine: Engine,
    books: Books,
    pool: str,
    opened: contextlib.ExitStack,
) -> Replica:
    """Return a replica of this process, which samples nothing yet."""
    desk = ReplicaDesk()
    thread, verifiers = make_thread(parts, engine, desk, books, pool, opened)
    return Replica(
        thread,
        desk,
        capacity=-(-parts.config.sampler.slots // parts.config.batch.group_size),
        verifier_restarts=lambda: _restarts(verifiers),
    )


def make_fleet(
    parts: GeneratorParts,
    desk: OrderDesk,
    ledger: Ledger,
    *,
    connect: Callable[[int], Future[Link]],
    address: Callable[..., object],
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


def _restarts(verifiers: Sequence[VerifierPool]) -> int:
    return sum(pool.restarts for pool in verifiers)


def _done(link: Link) -> Future[Link]:
    future: Future[Link] = Future()
    future.set_result(link)
    return future
