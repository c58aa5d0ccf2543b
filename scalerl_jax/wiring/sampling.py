"""Build generators from a Config: tokenizer, engine, evaluation, probe, thread.

Several replicas: `wiring.replicas`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from scalerl_jax.config import Config
from scalerl_jax.contract import Orders
from scalerl_jax.controller.orders import OrderBook
from scalerl_jax.data.detokenizer import Detokenizer, Marker, make_marker
from scalerl_jax.data.tokenizer import Tokenizer, load_tokenizer
from scalerl_jax.environments.pool import VerifierPool
from scalerl_jax.environments.run_verifiers import num_processes
from scalerl_jax.environments.verdict import OwnReward
from scalerl_jax.generation.driver import LocalGenerators
from scalerl_jax.generation.episodes import Episodes
from scalerl_jax.generation.evaluation import Evaluator, Probe
from scalerl_jax.generation.judging import Judging
from scalerl_jax.generation.turns import Turns
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.rope import DynamicScaling
from scalerl_jax.run.ledger import Ledger
from scalerl_jax.run.progress import Progress
from scalerl_jax.sampler.decoding import NEVER, EngineSettings
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.sampler.protocol import Sampler
from scalerl_jax.sampler.requests import LengthBudget, Samples
from scalerl_jax.sampler.sampling import (
    Purpose,
    Sampling,
    interruption_lengths,
    sample_keys,
)
from scalerl_jax.sampler.scheduler import KvOnUpdate, Scheduler
from scalerl_jax.types import Prompt
from scalerl_jax.wiring.devices import generator_pools
from scalerl_jax.wiring.prompts import (
    answer_after,
    make_render,
    make_verifier,
    make_writer,
)
from scalerl_jax.wiring.thinking import check_phrase, check_thinking

E = TypeVar("E", bound=Engine)
G = TypeVar("G", bound=LocalGenerators)


def make_tokenizer(config: Config, arch: Architecture) -> Tokenizer:
    """Return the tokenizer, which keeps the markers of the settings in its texts.

    Raises:
        ValueError: the model lacks an embedding for one of the tokenizer's ids.
    """
    interruption = config.interruption
    end = (interruption.end_of_thinking,) if interruption.enabled else ()
    tokenizer = dataclasses.replace(
        load_tokenizer(config.data.tokenizer or config.model.checkpoint),
        markers=(config.data.answer_after, *end),
    )
    if tokenizer.vocab_size > arch.vocab_size:
        raise ValueError(
            f"data.tokenizer has {tokenizer.vocab_size} ids and the model "
            f"{arch.vocab_size} embeddings; use the tokenizer of the checkpoint"
        )
    return tokenizer


def make_checked_tokenizer(config: Config, arch: Architecture) -> Tokenizer:
    """Return the tokenizer, after checks of answers and interruptions against it.

    Raises:
        ValueError: by `make_tokenizer` or `wiring.thinking`.
    """
    tokenizer, render = make_tokenizer(config, arch), make_render(config)
    check_thinking(config, render)
    check_phrase(config, tokenizer)
    return tokenizer


def check_positions(
    config: Config, arch: Architecture, *, of: str = "the model"
) -> None:
    """Refuse sequences beyond the positions up to which a dynamic rope is constant.

    `of` names the model in the message.
    """
    sampler, most = config.sampler, constant_positions(arch)
    longest = sampler.max_prompt_tokens + sampler.max_completion_tokens
    if most and longest > most:
        raise ValueError(
            f"sampler.max_prompt_tokens + sampler.max_completion_tokens = {longest} is "
            f"more than the {most} positions of {of}, beyond which its rope of type "
            f"'dynamic' would change with every token; lower one of them"
        )


def constant_positions(arch: Architecture) -> int:
    """Return the positions up to which a dynamic rope is constant; 0: no limit."""
    dynamic = isinstance(arch.rope_scaling, DynamicScaling)
    return arch.max_positions if dynamic else 0


def _check_room(config: Config, phrase: int) -> None:
    """Refuse an interruption of `phrase` tokens that leaves no room for an answer."""
    # The smallest limit decides: a larger one leaves at least this room.
    budget = make_length_budget(config)
    limit = budget.limit(0)
    room = limit - budget.thinking(config.interruption.max_tokens, limit=limit)
    if phrase >= room:
        name = "sampler.max_completion_tokens - interruption.max_tokens"
        if config.sampler.length_stages:
            name = (
                f"the rest of the first of sampler.length_stages, {limit} tokens, "
                f"after its share of interruption.max_tokens"
            )
        raise ValueError(
            f"interruption.phrase has {phrase} tokens and {name} = {room} leaves no "
            f"room for an answer after it"
        )


def make_engine(
    config: Config,
    arch: Architecture,
    tokenizer: Tokenizer,
    mesh: Mesh,
    *,
    kind: type[E] = Engine,
) -> E:
    """Return an engine that samples for training.

    Raises:
        ValueError: a phrase leaves no room, or sequences are too long for the model.
    """
    sampler, interruption = config.sampler, config.interruption
    check_positions(config, arch)
    phrase: tuple[int, ...] = ()
    end: Marker | None = None
    if interruption.enabled:
        # Encoded alone, since it is forced in after tokens that are already sampled.
        phrase = tuple(tokenizer.encode(interruption.phrase))
        if interruption.end_of_thinking:
            end = make_marker(
                interruption.end_of_thinking,
                tokenizer.shown,
                vocabulary=arch.vocab_size,
            )
        _check_room(config, len(phrase))
    settings = EngineSettings(
        arch=arch,
        slots=sampler.slots,
        max_prompt_tokens=sampler.max_prompt_tokens,
        max_completion_tokens=sampler.max_completion_tokens,
        tokens_per_call=sampler.tokens_per_call,
        dtype=jnp.dtype(config.model.sampler_dtype),
        eos_ids=tokenizer.eos_ids,
        float32_head=config.model.float32_head,
        phrase=phrase,
        end_of_thinking=end,
        page_size=sampler.page_size,
        cache_tokens=sampler.cache_tokens,
        prefill_tokens=sampler.prefill_tokens,
        kv_dtype=sampler.kv_dtype,
        weights_dtype=sampler.weights_dtype,
        attention=sampler.attention,
        report_experts=config.objective.routing_replay == "on",
        # A synchronous run that resumes is bit for bit the one that never ended.
        few_programs=config.queue.max_staleness > 0,
    )
    return kind(settings, mesh=mesh)


def weights_format(config: Config) -> dict[str, Any]:
    """Return the arguments `dtype` and `weights_dtype` of the sampler's params."""
    return dict(
        dtype=jnp.dtype(config.model.sampler_dtype),
        weights_dtype=config.sampler.weights_dtype,
    )


def make_sampler(
    pages: PagePool,
    *,
    kv_on_update: KvOnUpdate = "keep",
    detokenizer: Detokenizer | None = None,
) -> Sampler:
    """Return a sampler with its own slots, and pages of a pool.

    Training, evaluation and serving get their samplers here, and use only the protocol.
    """
    return Scheduler(pages, kv_on_update=kv_on_update, detokenizer=detokenizer)


def make_distribution(config: Config) -> Sampling:
    """Return the distribution that training samples from."""
    sampler = config.sampler
    return Sampling(
        temperature=sampler.temperature,
        top_k=sampler.top_k,
        top_p=sampler.top_p,
        min_p=sampler.min_p,
    )


def make_samples_of(
    config: Config, purpose: Purpose, num_samples: int
) -> Callable[[Prompt], Samples]:
    """Return a function that draws keys and interruption lengths for a prompt."""
    interruption = config.interruption

    def make_samples(prompt: Prompt) -> Samples:
        keys = sample_keys(
            config.seed,
            purpose,
            prompt_id=prompt.prompt_id,
            epoch=prompt.epoch,
            num_samples=num_samples,
        )
        if not interruption.enabled:
            limits = np.full(num_samples, NEVER, np.int32)
        else:
            limits = interruption_lengths(
                keys,
                min_tokens=interruption.min_tokens,
                max_tokens=interruption.max_tokens,
            )
        return Samples(keys=keys, thinking_limits=limits)

    return make_samples


def make_length_budget(config: Config) -> LengthBudget:
    """Return the length limit of training completions, by optimizer step."""
    sampler = config.sampler
    return LengthBudget(
        stages=sampler.length_stages,
        max_completion_tokens=sampler.max_completion_tokens,
    )


def make_judging(config: Config, tokenizer: Tokenizer) -> Judging:
    """Return the rules that turn completions into answers and verdicts into rewards."""
    return Judging(
        tokenizer=tokenizer,
        answer_after=answer_after(config),
        correct=config.reward.correct,
        wrong=config.reward.wrong,
        cut_off_is_wrong=config.objective.cut_off_completions == "wrong",
        unjudged_is_wrong=config.reward.unjudged == "wrong",
        max_too_costly_share=config.reward.max_too_costly_share,
        whole=bool(config.environment),
    )


def make_turns(config: Config, tokenizer: Tokenizer) -> Turns | None:
    """Return the limits of an environment's turns, and the writer between them."""
    if not config.environment:
        return None
    return Turns(
        # It is made at the first observation: reward functions need none.
        writer=functools.cache(functools.partial(make_writer, config, tokenizer)),
        max_turns=config.episode.max_turns,
        max_observation_tokens=config.episode.max_observation_tokens,
        max_tokens=config.sampler.max_completion_tokens,
        timeout_s=config.episode.timeout_s,
    )


def make_evaluator(
    config: Config,
    pages: PagePool,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    verifier: VerifierPool,
    progress: Progress,
) -> Evaluator:
    """Return the evaluation on a training engine's pages, at eval.temperature."""
    return Evaluator(
        make_sampler=functools.partial(make_sampler, pages),
        prompts=prompts,
        samples_per_prompt=config.eval.samples_per_prompt,
        sampling=dataclasses.replace(
            make_distribution(config), temperature=config.eval.temperature
        ),
        make_samples=make_samples_of(config, "eval", config.eval.samples_per_prompt),
        verifier=verifier,
        judging=make_judging(config, tokenizer),
        logged_rollouts=config.eval.logged_rollouts,
        turns=make_turns(config, tokenizer),
        progress=progress,
    )


def make_probe(config: Config, pages: PagePool, prompts: Sequence[Prompt]) -> Probe:
    """Return the probe on held-out prompts of 4 lengths, shortest to longest."""
    ordered = sorted(prompts, key=lambda prompt: len(prompt.tokens))
    places = np.linspace(0, len(ordered) - 1, min(4, len(ordered))).astype(int)
    return Probe(
        make_sampler=functools.partial(make_sampler, pages),
        prompts=[ordered[place] for place in places],
        sampling=make_distribution(config),
        make_samples=make_samples_of(config, "eval", config.batch.group_size),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorParts:
    """The parts that every replica of a run is built from."""

    config: Config
    tokenizer: Tokenizer
    held_out: Sequence[Prompt]  # for evaluations; some also for the mismatch
    own: OwnReward | None  # judges in place of each prompt's own verifier
    progress: Progress
    verifiers: int = 0  # processes per verifier pool; 0: the config's number


def share_verifiers(parts: GeneratorParts, replicas: int) -> GeneratorParts:
    """Return the parts with verifiers divided among `replicas`; print the number."""
    workers = num_processes(parts.config.reward.num_workers)
    workers = max(workers // replicas, 1)
    parts.progress.note(
        f"verifier processes: {workers} for training, {workers} for evaluations"
        + (f", of each of {replicas} replicas" if replicas > 1 else "")
    )
    return dataclasses.replace(parts, verifiers=workers)


def make_generators(
    parts: GeneratorParts,
    engines: Sequence[Engine],
    orders: OrderBook,
    ledger: Ledger,
    opened: contextlib.ExitStack,
) -> tuple[LocalGenerators, Callable[[], int]]:
    """Return the generators of a single replica, as `make_thread` does."""
    (engine,), (pool,) = engines, generator_pools(parts.config)
    parts = share_verifiers(parts, 1)
    return make_thread(parts, engine, orders, ledger, pool, opened)


def make_thread(
    parts: GeneratorParts,
    engine: Engine,
    orders: Orders,
    ledger: Ledger,
    pool: str,
    opened: contextlib.ExitStack,
    *,
    kind: type[G] = LocalGenerators,
) -> tuple[G, Callable[[], int]]:
    """Return a sampling thread, not started, and a count of its verifiers' restarts.

    `opened` closes the verifier processes.
    """
    config, tokenizer, held_out = parts.config, parts.tokenizer, parts.held_out
    verifiers = [
        make_verifier(config, opened, own=parts.own, count=parts.verifiers)
        for _ in range(2)
    ]
    make_samples = make_samples_of(config, "train", config.batch.group_size)
    judging, budget = make_judging(config, tokenizer), make_length_budget(config)
    # Of training, evaluations and the probe.  What is in the cache when a synchronous
    # run ends is gone when it resumes, bit for bit, and other programs round otherwise.
    asynchronous = config.queue.max_staleness > 0
    pages = PagePool(engine, prefix_cache=config.sampler.prefix_cache and asynchronous)
    evaluator = make_evaluator(
        config, pages, held_out, tokenizer, verifiers[1], parts.progress
    )
    generators = kind(
        sampler=make_sampler(pages, kv_on_update=config.sampler.kv_on_update),
        orders=orders,
        episodes=Episodes(verifiers[0], judging.answer, make_turns(config, tokenizer)),
        judging=judging,
        sampling=make_distribution(config),
        make_samples=lambda prompt, version: budget.cut(
            make_samples(prompt), step=version
        ),
        evaluator=evaluator,
        probe=make_probe(config, pages, held_out),
        ledger=ledger,
        flops=lambda stats: stats.flops(engine.settings.arch),
        pool=pool,
        group_timeout_s=config.queue.group_timeout_s,
        batch_timeout_s=config.queue.batch_timeout_s,
    )
    return generators, lambda: sum(pool.restarts for pool in verifiers)
