"""The controller's work per batch, by batch size: does it grow faster than the batch?

    python benchmarks/growth.py
    python benchmarks/growth.py --prompts=48,96,192 --repeats=3

Groups of an 8B run's form: prompts of 60 to 400 tokens, 16 completions each whose
lengths are lognormal around 200, 1,500 at most.  Prints Markdown: seconds of CPU, the
least of the repeats, and the exponent of a line through their logarithms.
"""

import argparse
import functools
import platform
import time
from collections.abc import Callable

import numpy as np

from scalerl_jax.batching.group_metrics import group_metrics
from scalerl_jax.batching.packing import first_fit, pack, train_sequences
from scalerl_jax.batching.stream_packing import StreamShape, pack_shared
from scalerl_jax.types import Group, Prompt, Rollout

GROUP_SIZE, ROW_TOKENS = 16, 2048
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


def parts_of(groups: list[Group]) -> dict[str, Callable[[], object]]:
    """Return the functions that are measured on the groups, by name."""
    weights = np.ones((len(groups) * GROUP_SIZE, 1501), np.float32)
    sequences = [*train_sequences(groups, weights=weights, learner_version=0).values()]
    lengths = [sequence.row_length for sequence in sequences]
    rows = dict(row_tokens=ROW_TOKENS, rows_per_microbatch=8)
    return {
        "first fit": functools.partial(first_fit, lengths, ROW_TOKENS, packing=True),
        "rows laid out": functools.partial(pack, sequences, **rows),
        "streams that share prompts": functools.partial(
            pack_shared, sequences, SHAPE, streams=1
        ),
        "metrics of groups": functools.partial(
            group_metrics, groups, learner_version=0
        ),
    }


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the least CPU seconds of a call."""
    found = []
    for _ in range(repeats):
        started = time.process_time()
        function()
        found.append(time.process_time() - started)
    return min(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", default="48,96,192,384,768,1536")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    sizes = [int(each) for each in options.prompts.split(",")]
    table: dict[str, list[float]] = {}
    for size in sizes:
        for name, part in parts_of(make_groups(size)).items():
            table.setdefault(name, []).append(seconds(part, options.repeats))
    print(f"{platform.processor() or platform.machine()}, CPU seconds a batch\n")
    print(f"| prompts | {' | '.join(map(str, sizes))} | exponent |")
    print("|---" * (len(sizes) + 2) + "|")
    for name, times in table.items():
        exponent, _ = np.polyfit(np.log(sizes), np.log(times), 1)
        cells = " | ".join(f"{each:.3f}" for each in times)
        print(f"| {name} | {cells} | {exponent:.2f} |")


if __name__ == "__main__":
    main()
