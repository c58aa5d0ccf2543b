"""Generators from a Config: a sampling thread, or replicas in threads of their own."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from scalerl_jax.config import Config
from scalerl_jax.contract import Desk
from scalerl_jax.coordination.desk import OrderDesk
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.generation.episodes import Episodes
from scalerl_jax.generation.local import LocalGenerators
from scalerl_jax.rewards.named import num_processes
from scalerl_jax.rewards.verifier import VerifierPool
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.types import Prompt
from scalerl_jax.utils.ledger import Ledger
from scalerl_jax.utils.progress import Progress
from scalerl_jax.utils.work_log import Books
from scalerl_jax.wiring.devices import generator_pools
from scalerl_jax.wiring.prompts import make_verifier
from scalerl_jax.wiring.sampling import (
    make_distribution,
    make_evaluator,
    make_judging,
    make_probe,
    make_training_samples,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorParts:
    """The ingredients of every replica of a run."""

    config: Config
    tokenizer: Tokenizer
    held_out: Sequence[Prompt]  # evaluated, and some of them compared with the learner
    progress: Progress


def share_verifiers(parts: GeneratorParts, replicas: int) -> GeneratorParts:
    """Return the parts of one of so many replicas of this machine, and say so."""
    workers = num_processes(parts.config.reward.num_workers)
    workers = max(workers // replicas, 1)
    parts.progress.note(
        f"verifier processes: {workers} for training, {workers} for evaluations"
        + (f", of each of {replicas} replicas" if replicas > 1 else "")
    )
    reward = dataclasses.replace(parts.config.reward, num_workers=workers)
    return dataclasses.replace(
        parts, config=dataclasses.replace(parts.config, reward=reward)
    )


def make_generators(
    parts: GeneratorParts,
    engines: Sequence[Engine],
    desk: OrderDesk,
    ledger: Ledger,
    opened: contextlib.ExitStack,
) -> tuple[LocalGenerators, Callable[[], int]]:
    """Return the generators, not started, and what counts their verifiers' restarts.

    Verifier processes are closed with `opened`.
    """
    (engine,), (pool,) = engines, generator_pools(parts.config)
    parts = share_verifiers(parts, 1)
    thread, verifiers = make_thread(parts, engine, desk, ledger, pool, opened)
    return thread, lambda: restarts(verifiers)


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


def restarts(verifiers: Sequence[VerifierPool]) -> int:
    """Return how many processes have been replaced."""
    return sum(pool.restarts for pool in verifiers)
