"""The controller's work per batch, by batch size: does it grow faster than the batch?

    python benchmarks/growth.py
    python benchmarks/growth.py --prompts=48,96,192 --repeats=3

Groups of an 8B run's form: prompts of 60 to 400 tokens, 16 completions each whose
lengths are lognormal around 200, 1,500 at most.  Prints Markdown: seconds of CPU, the
least of the repeats, and the exponent of a line through their logarithms.  Then the
same of a checkpoint's history, by the prompts of the data, and the bytes of a batch:
packed, kept for ranks that start again, and on its way to them.
"""

import argparse
import dataclasses
import functools
import json
import platform
import time
from collections.abc import Callable

import jax
import numpy as np

from scalerl_jax.algo.advantages import token_weights
from scalerl_jax.batching.assembly import Assembler, Batch
from scalerl_jax.batching.group_metrics import group_metrics
from scalerl_jax.batching.packing import (
    ROW_SEGMENTS,
    first_fit,
    pack,
    train_sequences,
)
from scalerl_jax.batching.stream_packing import StreamShape, pack_shared
from scalerl_jax.cluster.batch_parts import SentBatches, arrays_of
from scalerl_jax.cluster.kept_batches import KeptBatch
from scalerl_jax.data.prompts import PromptStream
from scalerl_jax.learner.contents import check_json
from scalerl_jax.types import Group, Prompt, Rollout

GROUP_SIZE, ROW_TOKENS, ROWS = 16, 2048, 16
SHAPE = StreamShape(
    rows=4,
    row_tokens=ROW_TOKENS,
    shared_tokens=2048,
    own_tokens=6000,
    group_size=GROUP_SIZE,
)


def make_groups(num_prompts: int, *, seed: int = 0) -> list[Group]:
    """Return groups whose rollouts have random lengths, rewards and versions."""
    random = np.random.default_rng(seed)
    return [_group(random, number) for number in range(num_prompts)]


def _group(random: np.random.Generator, number: int) -> Group:
    prompt = Prompt(
        prompt_id=number,
        epoch=0,
        text="",
        tokens=np.full(int(random.integers(60, 400)), number % 1000, np.int32),
        task=f"task{number % 5}",
        reference={},
    )
    lengths = np.minimum(random.lognormal(5.3, 0.7, GROUP_SIZE), 1500).astype(int) + 1
    return Group(
        ticket=number,
        finished_version=0,
        prompt=prompt,
        rollouts=tuple(_rollout(random, int(length)) for length in lengths),
    )


def _rollout(random: np.random.Generator, length: int) -> Rollout:
    passed = bool(random.integers(2))
    return Rollout(
        completion_tokens=np.zeros(length, np.int32),
        completion_mask=np.ones(length, bool),
        behavior_logprobs=np.zeros(length, np.float32),
        policy_versions=np.zeros(length, np.int32),
        cut_off=False,
        interrupted=False,
        reward=1.0 if passed else -1.0,
        passed=passed,
        status="correct" if passed else "wrong",
    )


def make_assembler() -> Assembler:
    """Return an assembler whose advantages are the rewards."""
    return Assembler(
        advantages=lambda batch, rewards: dataclasses.replace(
            batch, advantages=rewards.on_tokens(rewards.rewards)
        ),
        weigh=token_weights,
        zero_variance_filter=True,
        mask_cut_off=False,
        group_size=GROUP_SIZE,
        max_completion_tokens=1501,
        pack=functools.partial(pack, row_tokens=ROW_TOKENS, rows_per_microbatch=ROWS),
    )


def make_batch(groups: list[Group]) -> Batch:
    """Return the batch of these groups, with advantages."""
    assemble = make_assembler()
    return assemble.complete(assemble(groups, learner_version=0), {})


def saved_history(stream: PromptStream) -> str:
    """Return what a checkpoint has of it, as the loop makes it."""
    state = stream.state()
    check_json(state, name="stream")
    return json.dumps(state)


def make_history(num_prompts: int) -> PromptStream:
    """Return a stream of which each prompt was sampled in each of some epochs."""
    stream = PromptStream(range(num_prompts), seed=0, max_pass_rate=0.9)  # type: ignore
    random = np.random.default_rng(0)
    counts = random.integers(0, 17, num_prompts)
    state = stream.state() | {
        "drawn": [3] * num_prompts,
        "rollouts": [48] * num_prompts,
        "passed": counts.tolist(),
    }
    stream.restore(state)
    return stream


def bytes_of(batch: Batch) -> dict[str, int]:
    """Return the bytes of a batch: packed, kept, and sent to ranks with equal rows."""
    assert batch.packed is not None, "rewards differ"
    found = {
        "packed": sum(each.nbytes for each in jax.tree.leaves(batch.packed)),
        "kept": KeptBatch.of(batch.packed, batch).num_bytes,
    }
    for ranks in (8, 16):
        rows, sent = ROWS // ranks, SentBatches()
        sent.meet(
            [
                {
                    name: ((rank * rows, (rank + 1) * rows), (0, array.shape[2]))
                    for name, array in arrays_of(batch.packed).items()
                }
                for rank in range(ranks)
            ]
        )
        sent.parts(batch.packed)
        found[f"sent to {ranks} ranks"] = sent.num_bytes
    return found


def parts_of(groups: list[Group]) -> dict[str, Callable[[], object]]:
    """Return the functions that are measured on the groups, by name."""
    batch, assemble = make_batch(groups), make_assembler()
    kept = KeptBatch.of(batch.packed, batch)
    weights = np.ones((len(groups) * GROUP_SIZE, 1501), np.float32)
    sequences = [*train_sequences(groups, weights=weights, learner_version=0).values()]
    lengths = [sequence.row_length for sequence in sequences]
    rows = dict(row_tokens=ROW_TOKENS, rows_per_microbatch=8)
    return {
        "first fit": functools.partial(first_fit, lengths, ROW_TOKENS, ROW_SEGMENTS),
        "rows laid out": functools.partial(pack, sequences, **rows),
        "streams that share prompts": functools.partial(
            pack_shared, sequences, SHAPE, streams=1
        ),
        "metrics of groups": functools.partial(
            group_metrics, groups, learner_version=0
        ),
        "a batch kept": functools.partial(KeptBatch.of, batch.packed, batch),
        "packed again": functools.partial(kept.packed, assemble),
    }


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the least CPU seconds of a call."""
    found = []
    for _ in range(repeats):
        started = time.process_time()
        function()
        found.append(time.process_time() - started)
    return min(found)


def print_table(
    sizes: list[int], table: dict[str, list[float]], *, head: str, form: str = ".3f"
) -> None:
    """Print a row for each name, with the exponent of its growth."""
    print(f"\n| {head} | {' | '.join(map(str, sizes))} | exponent |")
    print("|---" * (len(sizes) + 2) + "|")
    for name, found in table.items():
        exponent, _ = np.polyfit(np.log(sizes), np.log(found), 1)
        cells = " | ".join(f"{each:{form}}" for each in found)
        print(f"| {name} | {cells} | {exponent:.2f} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", default="48,96,192,384,768,1536")
    parser.add_argument("--data", default="1000,10000,100000,1000000")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    sizes = [int(each) for each in options.prompts.split(",")]
    table: dict[str, list[float]] = {}
    megabytes: dict[str, list[float]] = {}
    for size in sizes:
        groups = make_groups(size)
        for name, part in parts_of(groups).items():
            table.setdefault(name, []).append(seconds(part, options.repeats))
        for name, each in bytes_of(make_batch(groups)).items():
            megabytes.setdefault(name, []).append(each / 1e6)
    print(f"{platform.processor() or platform.machine()}, CPU seconds a batch")
    print_table(sizes, table, head="prompts")
    data = [int(each) for each in options.data.split(",")]
    history = [
        seconds(functools.partial(saved_history, make_history(size)), options.repeats)
        for size in data
    ]
    print_table(
        data, {"history saved": history}, head="prompts of the data", form=".4f"
    )
    print_table(sizes, megabytes, head="MB of a batch", form=".1f")


if __name__ == "__main__":
    main()
