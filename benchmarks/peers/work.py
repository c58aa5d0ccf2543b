"""The work that every contender does, and the measures of its time and memory.

Standard library only: it is imported in environments that share no package.  Each
contender is a process that prints one JSON line (`report`, `report_training`).
"""

import argparse
import importlib.metadata
import json
import os
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Qwen3 decoders: RMSNorm, qk-norm, SwiGLU, grouped queries, tied embeddings, float32.
WORKLOADS: dict[str, dict[str, int]] = {
    "W1": dict(vocab=512, hidden=256, layers=4, heads=4, kv_heads=2, head_dim=64,
               ffn=768),
    "W2": dict(vocab=32_000, hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64,
               ffn=1536),
}  # fmt: skip
ROPE_THETA, NORM_EPS = 1e6, 1e-6  # Tunix 0.1.7 has no other theta
PROMPTS, GROUP = 16, 8
SEQUENCES = PROMPTS * GROUP
PROMPT_TOKENS, MAX_NEW_TOKENS, MEAN_NEW_TOKENS = 32, 256, 64
PAD, EOS = 0, 1  # prompts are drawn from the ids above; no contender stops at EOS
SEED = 0
WARM_UP_RUNS = 1  # whole runs after compilation: torch's first one is slower
# Of training: sequences of an optimizer update, and passes over all 128 that are timed.
# Updates on all 128 would take the peers a minute on W2.
UPDATE_SEQUENCES = {"W1": SEQUENCES, "W2": 32}
EPOCHS = {"W1": 3, "W2": 1}
LEARNING_RATE, CLIP_RATIO, MAX_GRAD_NORM = 1e-6, 0.2, 1.0
KINDS = ("dense", "tail")  # every completion of 256 tokens; of `completion_lengths`


def completion_lengths() -> list[int]:
    """Tokens of each of the 128 completions, in the order of `prompts`.

    A seeded lognormal with a long tail, clipped: mean exactly 64, greatest exactly 256.
    """
    rng = random.Random(SEED)
    draws = [rng.lognormvariate(0.0, 1.0) for _ in range(SEQUENCES)]
    total = MEAN_NEW_TOKENS * SEQUENCES

    def clipped(scale: float) -> list[int]:
        return [min(MAX_NEW_TOKENS, max(1, round(draw * scale))) for draw in draws]

    low, high = 0.0, 1000.0
    for _ in range(60):  # the largest scale whose total does not exceed the target
        middle = (low + high) / 2
        fits = sum(clipped(middle)) <= total
        low, high = (middle, high) if fits else (low, middle)
    lengths = clipped(low)
    for index in sorted(range(SEQUENCES), key=lengths.__getitem__):
        if sum(lengths) == total:
            break
        lengths[index] += 1  # the remainder of rounding
    assert max(lengths) == MAX_NEW_TOKENS and sum(lengths) == total
    return lengths


def prompts(workload: str) -> list[list[int]]:
    """16 prompts of 32 token ids; each is completed `GROUP` times."""
    rng = random.Random(SEED + 1)
    vocab = WORKLOADS[workload]["vocab"]
    return [
        [rng.randrange(EOS + 1, vocab) for _ in range(PROMPT_TOKENS)]
        for _ in range(PROMPTS)
    ]


def repeated_prompts(workload: str) -> list[list[int]]:
    """The 128 prompts of a static batch: each of the 16 eight times."""
    return [prompt for prompt in prompts(workload) for _ in range(GROUP)]


def completions(workload: str, kind: str) -> list[list[int]]:
    """Tokens of the 128 completions; for "tail" cut to the real lengths."""
    rng = random.Random(SEED + 2)
    vocab = WORKLOADS[workload]["vocab"]
    drawn = [
        [rng.randrange(EOS + 1, vocab) for _ in range(MAX_NEW_TOKENS)]
        for _ in range(SEQUENCES)
    ]
    if kind == "dense":
        return drawn
    lengths = completion_lengths()
    return [tokens[:length] for tokens, length in zip(drawn, lengths, strict=True)]


def padded_completions(
    workload: str, kind: str
) -> tuple[list[list[int]], list[list[int]]]:
    """The completions filled up to 256 tokens, and their masks of 1 and 0."""
    found = completions(workload, kind)
    return (
        [tokens + [PAD] * (MAX_NEW_TOKENS - len(tokens)) for tokens in found],
        [[1] * len(tokens) + [0] * (MAX_NEW_TOKENS - len(tokens)) for tokens in found],
    )


def rewards() -> list[float]:
    """Return the rewards of the 128 completions; peers take them for advantages."""
    rng = random.Random(SEED + 3)
    return [rng.gauss(0.0, 1.0) for _ in range(SEQUENCES)]


def timed(call: Callable[[], int]) -> dict[str, float]:
    """Time one call that returns its tokens: tokens, seconds, disturbance.

    `other_cores` is the number of cores that everything else (other processes, the
    hypervisor) used meanwhile; 0 if the system does not report it.
    """
    (own_before, all_before), start = _cpu_seconds(), time.perf_counter()
    tokens = call()
    seconds = time.perf_counter() - start
    own_after, all_after = _cpu_seconds()
    own = own_after - own_before
    others = (all_after - all_before) - own
    return dict(
        tokens=tokens,
        seconds=seconds,
        cpu_seconds=own,
        other_cores=max(0.0, others / seconds),
        peak_rss_mb=peak_rss_mb(),
    )


def _cpu_seconds() -> tuple[float, float]:
    """CPU seconds used by this process, and used or stolen on the whole machine."""
    own = sum(os.times()[:2])
    stat = Path("/proc/stat")
    if not stat.is_file():
        return own, own
    fields = map(int, stat.read_text().splitlines()[0].split()[1:9])
    user, nice, system, _, _, irq, soft, steal = fields
    ticks = os.sysconf("SC_CLK_TCK")
    return own, (user + nice + system + irq + soft + steal) / ticks


def peak_rss_mb() -> float:
    """The most resident memory this process has had so far, in MiB."""
    unit = 2**20 if platform.system() == "Darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions of `packages`, and Python's."""
    found = {name: importlib.metadata.version(name) for name in packages}
    return found | {"python": platform.python_version()}


def contender_options() -> argparse.ArgumentParser:
    """The command line of every contender."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--weights", type=Path, required=True, help="HF directory")
    return parser


def report(
    contender: str,
    workload: str,
    *,
    packages: Sequence[str],
    useful: Callable[[], int],
    raw: Callable[[], int] | None,
    static_batch: bool = False,
    **details: Any,
) -> None:
    """Run both kinds of work and print the one JSON line.

    `useful` completes the 128 sequences at their real lengths and `raw` at 256 tokens
    each; they return the tokens they decoded.  Without `raw` that rate is not measured.
    A static batch decodes 256 tokens in every row either way: its one run, `useful`, is
    both.
    """
    for _ in range(WARM_UP_RUNS):
        useful()
    at_lengths = timed(useful)
    at_limit = at_lengths if static_batch else raw and timed(raw)
    line = dict(
        contender=contender,
        workload=workload,
        useful_tokens_per_s=SEQUENCES * MEAN_NEW_TOKENS / at_lengths["seconds"],
        raw_tokens_per_s=at_limit and at_limit["tokens"] / at_limit["seconds"],
        useful=at_lengths,
        raw=at_limit,
        versions=versions(packages),
        **details,
    )
    print(json.dumps(line), flush=True)


def report_training(
    contender: str,
    workload: str,
    *,
    packages: Sequence[str],
    update: Callable[[str, int], None],
    **details: Any,
) -> None:
    """Train on both kinds of completions and print the one JSON line.

    `update` makes one optimizer update on `UPDATE_SEQUENCES` sequences of a kind, from
    a given number on, and returns when the weights are ready.  The first update of a
    kind is not counted.  Tokens are those of prompts and completions, without padding.
    """
    line: dict[str, Any] = dict(contender=contender, workload=workload)
    for kind in KINDS:
        tokens = SEQUENCES * PROMPT_TOKENS + sum(map(len, completions(workload, kind)))

        def epoch(kind: str = kind, tokens: int = tokens) -> int:
            for first in range(0, SEQUENCES, UPDATE_SEQUENCES[workload]):
                update(kind, first)
            return tokens

        update(kind, 0)
        timings = [timed(epoch) for _ in range(EPOCHS[workload])]
        seconds = statistics.median(timing["seconds"] for timing in timings)
        line[kind] = dict(
            tokens_per_s=tokens / seconds,
            sequences_per_s=SEQUENCES / seconds,
            other_cores=max(timing["other_cores"] for timing in timings),
            peak_rss_mb=timings[-1]["peak_rss_mb"],
            timings=timings,
        )
    print(json.dumps(line | dict(versions=versions(packages), **details)), flush=True)
