"""Our sampler's side of the sampler benchmark: one measurement per process.

    python benchmarks/sampler_ours.py weights --workload=W1 --weights=DIR
    python benchmarks/sampler_ours.py contender --workload=W1 --weights=DIR
    python benchmarks/sampler_ours.py head|update|host|memory|prefix ...

Every command prints one JSON line; `sampler.py` runs them and prints the tables.
"""

import argparse
import dataclasses
import functools
import gzip
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # after the environment is set
import jax.numpy as jnp
import numpy as np
import ours
from peers import work

from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.transformer import init_params
from scalerl_jax.model.weights import load_params
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.parallel.xla import keep_freed_memory
from scalerl_jax.sampler.decoding import (
    NEVER,
    EngineSettings,
)
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.lowering import page_bytes
from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.sampler.requests import Request, Samples
from scalerl_jax.sampler.sampling import sample_keys
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.sampler.warming import warm_up
from scalerl_jax.types import PyTree

HEAD_NEW_TOKENS = 64  # of each sequence in `head`; four engines take their turns
HEAD_WORKLOAD = "W2"  # the larger vocabulary: the head is a third of the matmuls
HOST_SLOTS, HOST_REPEATS = 64, 6
HOST_CALLS = 16  # calls timed without the profiler, and as many with it
SETTLING_CALLS = 4  # the first ones prefill all slots at once
UPDATE_SETTLING, UPDATE_CALLS = 3, 24  # calls of one run
MEMORY_CONTEXTS = tuple(2**power for power in range(10, 16))  # tokens
MAX_TRACE_EVENTS = 1_000_000  # the profiler drops further ones
# Of `prefix`, in tokens: a beginning that prompts share, and what is each one's own;
# and the turns of a conversation, with as many tokens said between two of them.
PREFIX_PROMPTS, PREFIX_SHARED, PREFIX_OWN, PREFIX_NEW = 64, 480, 32, 16
PREFIX_CHATS, PREFIX_TURNS = 16, 8


def make_engine(
    arch: Architecture, params: PyTree, *, slots: int, **changes: Any
) -> Engine:
    """Return a compiled engine for the prompts; no token ends a completion."""
    settings: dict[str, Any] = dict(
        max_prompt_tokens=work.PROMPT_TOKENS,
        max_completion_tokens=work.MAX_NEW_TOKENS,
        dtype=jnp.float32,
        eos_ids=(),
        cache_tokens=0,  # every slot at full length
    )
    engine = Engine(
        EngineSettings(arch=arch, slots=slots, **(settings | changes)),
        mesh=make_mesh(jax.devices()[:1]),
    )
    warm_up(PagePool(engine), params)
    return engine


def knobs(options: argparse.Namespace) -> dict[str, int]:
    """Return the settings of an engine that the command line sets."""
    return dict(tokens_per_call=options.tokens_per_call, page_size=options.page_size)


def filled_scheduler(
    engine: Engine,
    params: PyTree,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
) -> Scheduler:
    """Return a scheduler with every prompt queued; `lengths` are for its samples."""
    scheduler = Scheduler(PagePool(engine))
    scheduler.load(params, 0)
    samples = len(lengths) // len(prompts)
    limits = np.asarray(lengths, np.int32).reshape(len(prompts), samples)
    for place, (prompt, max_tokens) in enumerate(zip(prompts, limits, strict=True)):
        keys = sample_keys(
            work.SEED, "train", prompt_id=place, epoch=0, num_samples=samples
        )
        scheduler.submit(
            Request(
                request_id=place,
                tokens=np.asarray(prompt, np.int32),
                samples=Samples(
                    keys=keys,
                    thinking_limits=np.full(samples, NEVER, np.int32),
                    max_tokens=max_tokens,
                ),
            )
        )
    return scheduler


def complete(
    engine: Engine, params: PyTree, workload: str, lengths: Sequence[int]
) -> tuple[int, dict[str, Any]]:
    """Complete the 128 sequences at `lengths`; return tokens decoded, and counts."""
    scheduler = filled_scheduler(engine, params, work.prompts(workload), lengths)
    found: list[int] = []
    while scheduler.busy:
        finished = scheduler.step()
        found += [len(completion.tokens) for completion in finished]
    assert sorted(found) == sorted(lengths), "a sample stopped at another length"
    return sum(found), dataclasses.asdict(scheduler.stats)


def contend(options: argparse.Namespace) -> None:
    """Measure the useful and the raw rate, as every peer does."""
    arch = ours.architecture(options.workload)
    params = load_params(options.weights, arch, dtype=jnp.float32)
    changes = knobs(options)
    engines = {
        slots: make_engine(arch, params, slots=slots, **changes)
        for slots in {options.slots, work.SEQUENCES}
    }
    lengths = {
        "useful": work.completion_lengths(),
        "raw": [work.MAX_NEW_TOKENS] * work.SEQUENCES,
    }
    stats: dict[str, Any] = {}

    def run(kind: str, slots: int) -> int:
        tokens, stats[kind] = complete(
            engines[slots], params, options.workload, lengths[kind]
        )
        return tokens

    work.report(
        "scalerl_jax",
        options.workload,
        packages=ours.PACKAGES,
        useful=lambda: run("useful", options.slots),
        raw=lambda: run("raw", work.SEQUENCES),
        settings=changes | dict(slots=options.slots),
        stats=stats,
    )


def measure_head(options: argparse.Namespace) -> None:
    """Measure seconds of raw decoding with and without the float32 head, in turns."""
    arch = ours.architecture(HEAD_WORKLOAD)
    master = load_params(options.weights, arch, dtype=jnp.float32)
    lengths = [HEAD_NEW_TOKENS] * work.SEQUENCES
    names, runs = [], []
    for dtype, float32_head in itertools.product(
        (jnp.bfloat16, jnp.float32), (False, True)
    ):
        params = jax.tree.map(lambda leaf, to=dtype: leaf.astype(to), master)
        engine = make_engine(
            arch,
            params,
            slots=work.SEQUENCES,
            max_completion_tokens=HEAD_NEW_TOKENS,
            dtype=dtype,
            float32_head=float32_head,
            **knobs(options),
        )
        names.append((jnp.dtype(dtype).name, float32_head))
        runs.append(
            lambda engine=engine, params=params: complete(
                engine, params, HEAD_WORKLOAD, lengths
            )[0]
        )
    timings = ours.alternate(runs, rounds=options.rounds)
    rows = [
        dict(dtype=dtype, float32_head=float32_head, timings=timing)
        for (dtype, float32_head), timing in zip(names, timings, strict=True)
    ]
    ours.show(dict(workload=HEAD_WORKLOAD, new_tokens=HEAD_NEW_TOKENS, rows=rows))


def measure_update(options: argparse.Namespace) -> None:
    """Measure seconds of `step` calls with changed params, and with the same ones.

    A step may read the results of the call before it, so calls come in pairs of a kind
    and the second is timed: it shows the first one's cost on the device and its own
    cost on the host.  The pairs are changed, same, same, changed: contexts grow, and so
    does the time of a call, by the same amount for both kinds.
    """
    arch = ours.architecture(options.workload)
    params = load_params(options.weights, arch, dtype=jnp.float32)
    other = jax.block_until_ready(jax.tree.map(lambda leaf: leaf * 1.001, params))
    # One call to spare: slots must stay full.
    new_tokens = (UPDATE_SETTLING + UPDATE_CALLS + 2) * options.tokens_per_call
    engine = make_engine(
        arch,
        params,
        slots=work.SEQUENCES,
        max_completion_tokens=new_tokens,
        **knobs(options),
    )
    lengths = [new_tokens] * work.SEQUENCES
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(options.rounds):
        scheduler = filled_scheduler(
            engine, params, work.prompts(options.workload), lengths
        )
        version, held, spare = 0, params, other
        for _ in range(UPDATE_SETTLING):
            scheduler.step()
        for changed in (True, False, False, True) * (UPDATE_CALLS // 8):
            for _ in range(2):
                if changed:
                    version, held, spare = version + 1, spare, held
                start = time.perf_counter()
                scheduler.load(held, version)
                finished = scheduler.step()
                second = time.perf_counter() - start
                assert not finished, "a slot drained within the measured calls"
            seconds[changed].append(second)
    differences = [
        new - same for new, same in zip(seconds[True], seconds[False], strict=True)
    ]
    ours.show(
        dict(
            workload=options.workload,
            params_mb=4 * arch.num_params / 2**20,
            tokens_per_call=engine.settings.tokens_per_call,
            call_seconds=statistics.median(seconds[False]),
            changed_call_seconds=statistics.median(seconds[True]),
            update_seconds=statistics.median(differences),
            update_seconds_quartiles=statistics.quantiles(differences, n=4)[::2],
            pairs=len(differences),
        )
    )


def measure_host(options: argparse.Namespace) -> None:
    """Measure the share of the wall time without a running program, by a trace."""
    arch = ours.architecture("W1")
    params = load_params(options.weights, arch, dtype=jnp.float32)
    engine = make_engine(arch, params, slots=HOST_SLOTS, **knobs(options))
    scheduler = filled_scheduler(
        engine,
        params,
        [
            [*prompt[repeat:], *prompt[:repeat]]  # no prompt comes twice
            for repeat in range(HOST_REPEATS)
            for prompt in work.prompts("W1")
        ],
        work.completion_lengths() * HOST_REPEATS,
    )
    left = len(work.completion_lengths()) * HOST_REPEATS
    for _ in range(SETTLING_CALLS):
        left -= len(scheduler.step())
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        left -= len(scheduler.step())
    untraced = (time.perf_counter() - start) / HOST_CALLS
    profile = jax.profiler.ProfileOptions()
    profile.python_tracer_level = 0  # its own time would count as Python's
    profile.host_tracer_level = 1
    with jax.profiler.trace(options.trace, profiler_options=profile):
        for _ in range(HOST_CALLS):
            left -= len(scheduler.step())
    assert left > 2 * HOST_SLOTS, "the line ran short: slots may not have been full"
    path = max(Path(options.trace).rglob("*.trace.json.gz"), key=os.path.getmtime)
    busy, wall, events = device_seconds(path)
    idle_per_call = (wall - busy) / HOST_CALLS
    ours.show(
        dict(
            workload="W1",
            slots=HOST_SLOTS,
            calls=HOST_CALLS,
            idle_share=1.0 - busy / wall,
            idle_seconds_per_call=idle_per_call,
            traced_seconds_per_call=wall / HOST_CALLS,
            untraced_seconds_per_call=untraced,
            idle_share_untraced=idle_per_call / untraced,
            events=events,
            trace=str(path.absolute()),
        )
    )


def device_seconds(path: Path) -> tuple[float, float, int]:
    """Return seconds in which a program ran, seconds from first to last, and events.

    On CPU every program and every operation of it is an event of XLA's thunk
    executor: the part of a program that waits for other threads has an event of its
    own, so only their union covers a program.
    """
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    if len(events) >= MAX_TRACE_EVENTS:
        raise RuntimeError(f"{path} is full at {len(events)} events; trace fewer calls")
    spans = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and is_execution(event)
    ]
    if not spans:
        raise RuntimeError(f"{path} holds no event of XLA's thunk executor")
    wall = max(end for _, end in spans) - min(start for start, _ in spans)
    return union(spans) / 1e6, wall / 1e6, len(events)


def is_execution(event: dict[str, Any]) -> bool:
    """Return whether a trace event is (a part of) a compiled program's execution."""
    source = str(event.get("args", {}).get("_src", ""))
    return "ThunkExecutor" in event["name"] or "thunk_executor" in source


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length that the intervals cover together."""
    covered, reached = 0.0, -np.inf
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def measure_memory(options: argparse.Namespace) -> None:
    """Measure the peak bytes of pages in use against the bytes of tokens in them."""
    longest = max(MEMORY_CONTEXTS)
    arch = Architecture(
        family="qwen3",
        vocab_size=64,
        hidden_size=64,
        ffn_size=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        rope_theta=work.ROPE_THETA,
        rms_eps=work.NORM_EPS,
        tied_embeddings=True,
        max_positions=longest,
        qk_norm=True,
    )
    params = init_params(arch, jax.random.key(work.SEED), dtype=jnp.float32)
    engine = make_engine(
        arch,
        params,
        slots=1,
        max_completion_tokens=longest - work.PROMPT_TOKENS,
        cache_tokens=longest + 2 * options.page_size,  # a copied page beside them
        **knobs(options),
    )
    token_bytes = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * 4
    rows = []
    for context in MEMORY_CONTEXTS:
        prompt = [2] * work.PROMPT_TOKENS
        scheduler = filled_scheduler(engine, params, [prompt], [context - len(prompt)])
        while scheduler.busy:
            scheduler.step()
        rows.append(
            dict(
                context=context,
                pages_bytes=scheduler.stats.peak_pages * page_bytes(engine),
                tokens_bytes=context * token_bytes,
            )
        )
    ours.show(dict(rows=rows))


def measure_prefix(options: argparse.Namespace) -> None:
    """Measure seconds with and without the prefix cache, in turns."""
    arch = ours.architecture(options.workload)
    params = load_params(options.weights, arch, dtype=jnp.float32)
    engine = make_engine(
        arch,
        params,
        slots=16,
        max_prompt_tokens=PREFIX_SHARED + PREFIX_OWN,
        max_completion_tokens=PREFIX_NEW,
        prefill_tokens=PREFIX_SHARED + PREFIX_OWN,
        **knobs(options),
    )
    stats: dict[tuple[str, bool], Any] = {}

    def run(kind: str, cached: bool) -> int:
        scheduler = Scheduler(PagePool(engine, prefix_cache=cached))
        scheduler.load(params, 0)
        rng = np.random.default_rng(work.SEED)
        tokens = {"prompts": ask_prompts, "turns": ask_turns}[kind](scheduler, rng)
        stats[kind, cached] = dataclasses.asdict(scheduler.stats)
        return tokens

    cases = list(itertools.product(("prompts", "turns"), (False, True)))
    timings = ours.alternate(
        [functools.partial(run, *case) for case in cases], rounds=options.rounds
    )
    rows = [
        dict(kind=kind, cached=cached, timings=timing, stats=stats[kind, cached])
        for (kind, cached), timing in zip(cases, timings, strict=True)
    ]
    ours.show(dict(workload=options.workload, rows=rows))


def ask_prompts(scheduler: Scheduler, rng: np.random.Generator) -> int:
    """Complete prompts that begin alike; return tokens decoded."""
    shared = rng.integers(2, 500, PREFIX_SHARED)
    for number in range(PREFIX_PROMPTS):
        own = rng.integers(2, 500, PREFIX_OWN)
        scheduler.submit(one_sample(number, np.concatenate([shared, own])))
    count = 0
    while scheduler.busy:
        count += sum(len(each.tokens) for each in scheduler.step())
    return count


def ask_turns(scheduler: Scheduler, rng: np.random.Generator) -> int:
    """Hold conversations whose prompts are all that was said; return tokens decoded."""
    said = {chat: rng.integers(2, 500, PREFIX_OWN) for chat in range(PREFIX_CHATS)}
    for chat, prompt in said.items():
        scheduler.submit(one_sample(chat, prompt))
    count = 0
    while scheduler.busy:
        for each in scheduler.step():
            number, chat = each.request_id, each.request_id % PREFIX_CHATS
            count += len(each.tokens)
            answer = rng.integers(2, 500, PREFIX_OWN)
            said[chat] = np.concatenate([said[chat], each.tokens, answer])
            if number < PREFIX_CHATS * (PREFIX_TURNS - 1):
                scheduler.submit(one_sample(number + PREFIX_CHATS, said[chat]))
    return count


def one_sample(number: int, prompt: np.ndarray) -> Request:
    """Return a request for one completion of `PREFIX_NEW` tokens."""
    keys = sample_keys(work.SEED, "train", prompt_id=number, epoch=0, num_samples=1)
    limits = np.full(1, NEVER, np.int32)
    return Request(
        request_id=number,
        tokens=prompt.astype(np.int32),
        samples=Samples(keys=keys, thinking_limits=limits),
    )


COMMANDS = {
    "weights": ours.write_weights,
    "contender": contend,
    "head": measure_head,
    "update": measure_update,
    "host": measure_host,
    "memory": measure_memory,
    "prefix": measure_prefix,
}


def main() -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--workload", choices=work.WORKLOADS, default="W1")
    parser.add_argument("--weights", type=Path, help="Hugging Face directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=work.SEQUENCES)
    parser.add_argument("--tokens-per-call", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=32, help="tokens")
    parser.add_argument("--trace", help="directory for the profiler's trace")
    options = parser.parse_args()
    # As every command of the package does on a CPU.
    keep_freed_memory(ours.architecture(options.workload).num_params)
    COMMANDS[options.command](options)


if __name__ == "__main__":
    main()
