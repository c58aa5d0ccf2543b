"""Our learner's side of the learner benchmark: one measurement per process.

    python benchmarks/learner_ours.py weights --workload=W1 --weights=DIR
    python benchmarks/learner_ours.py contender --workload=W1 --weights=DIR
    python benchmarks/learner_ours.py packing|tokens|head|remat|product ...

Every command prints one JSON line; `learner.py` runs them and prints the tables.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ours
from peers import work

from scalerl_jax.batching.assembly import Assembler
from scalerl_jax.batching.packing import TrainSequence, pack
from scalerl_jax.config import sections as settings
from scalerl_jax.learner.head import Head
from scalerl_jax.learner.logprobs import token_logprobs
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.transformer import REMAT, head_logits
from scalerl_jax.objective.assembly import make_assembler
from scalerl_jax.parallel.xla import keep_freed_memory
from scalerl_jax.run.progress import Progress
from scalerl_jax.types import Group, PackedBatch, Prompt, Rollout
from scalerl_jax.wiring import devices, learning

SEGMENT = 512  # tokens of the short segments of `tokens`
HEAD_WORKLOAD, HEAD_TOKENS = "W2", (2304, 4608)  # of 8 and of 16 rows
REMAT_WORKLOAD = "W2"
PRODUCT, PRODUCT_ROUNDS = 2048, 10  # side of the matrices


# Tiles of logits that caches hold.
ON_A_CPU = dict(head_chunk_tokens=256, head_chunk_vocab=32_768, scan_layers=False)


class Learner:
    """The train step of a run, its state, and its assembly of batches."""

    def __init__(
        self, config: settings.Config, arch: Architecture | None = None
    ) -> None:
        """Compile the step for `config`, as `scalerl_jax.wiring` does."""
        arch = arch or learning.make_architecture(config)
        mesh, _ = devices.make_meshes(config, arch, jax.devices())
        self.config, self.arch = config, arch
        forward = learning.make_forward(config, arch, mesh)
        self.state, self.step = learning.make_learner(config, forward, mesh, Progress())
        self.assemble = assembler(config)

    def update(self, groups: Sequence[Group]) -> None:
        """Make one optimizer step on rollouts in the form of the queue."""
        assembled = self.assemble(groups, learner_version=0)
        batch = self.assemble.complete(assembled, {}).packed
        assert batch is not None, "every group has a variance"
        self.train(batch)

    def train(self, batch: PackedBatch) -> None:
        """Make one optimizer step; return when the params are ready."""
        self.state, metrics = self.step(self.state, batch)
        jax.block_until_ready((self.state, metrics))
        assert not metrics["skipped"], "the loss or its gradient is not finite"

    def temporary_bytes(self) -> int:
        """Temporary bytes of the program of a microbatch."""
        return temporary_bytes(self.step.lower_accumulate().compile())


def assembler(config: settings.Config) -> Assembler:
    """Return the assembler of a step's rollouts into its batch."""
    return make_assembler(config, learning.make_architecture(config))


def temporary_bytes(program: Any) -> int:
    """Return a compiled program's memory besides its arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def make_config(
    options: argparse.Namespace, batch: dict[str, Any], **model: Any
) -> settings.Config:
    """Return the recipe at the benchmark's shapes, with changes of two sections."""
    if options.weights is not None:
        model["checkpoint"] = str(options.weights)
    return settings.Config(
        model=settings.ModelConfig(**(ON_A_CPU | model)),
        batch=settings.BatchConfig(group_size=work.GROUP, **batch),
        sampler=settings.SamplerConfig(
            max_prompt_tokens=work.PROMPT_TOKENS,
            max_completion_tokens=work.MAX_NEW_TOKENS,
        ),
        optimizer=settings.OptimizerConfig(
            learning_rate=work.LEARNING_RATE,
            warmup_steps=0,
            weight_decay=0.0,
            max_grad_norm=work.MAX_GRAD_NORM,
        ),
    )


def rollout_groups(workload: str, kind: str) -> list[Group]:
    """Return the 16 groups of a kind of completions, as a sampler reports them."""
    tokens, rewards = work.completions(workload, kind), work.rewards()
    evenly = -np.log(work.WORKLOADS[workload]["vocab"])

    def rollout(place: int) -> Rollout:
        shape = len(tokens[place])
        return Rollout(
            completion_tokens=np.asarray(tokens[place], np.int32),
            completion_mask=np.ones(shape, bool),
            behavior_logprobs=np.full(shape, evenly, np.float32),
            policy_versions=np.zeros(shape, np.int32),
            cut_off=False,
            interrupted=False,
            reward=rewards[place],
        )

    return [
        Group(
            ticket=number,
            prompt=Prompt(
                prompt_id=number,
                epoch=0,
                task="none",
                text="",
                tokens=np.asarray(prompt, np.int32),
                reference={},
            ),
            rollouts=tuple(
                rollout(number * work.GROUP + member) for member in range(work.GROUP)
            ),
            finished_version=0,
        )
        for number, prompt in enumerate(work.prompts(workload))
    ]


def updates(workload: str, groups: Sequence[Group]) -> list[Sequence[Group]]:
    """Return the groups of each optimizer update of an epoch."""
    size = work.UPDATE_SEQUENCES[workload] // work.GROUP
    return [groups[first : first + size] for first in range(0, len(groups), size)]


def rows_of(options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Return the shape of a microbatch whose prompts are not shared."""
    rows = dict(row_tokens=options.row_tokens, rows_per_microbatch=options.rows)
    return rows | more


def contend(options: argparse.Namespace) -> None:
    """Measure both kinds of completions, as every peer does."""
    learner: Learner | None = None
    batches = {kind: microbatch(options, kind) for kind in work.KINDS}
    groups = {kind: rollout_groups(options.workload, kind) for kind in work.KINDS}

    def update(kind: str, first: int) -> None:
        nonlocal learner
        config = make_config(options, batches[kind])
        if learner is None or learner.config != config:
            learner = None  # frees its memory before the next one is made
            learner = Learner(config)
        size = work.UPDATE_SEQUENCES[options.workload]
        learner.update(updates(options.workload, groups[kind])[first // size])

    work.report_training(
        "scalerl_jax",
        options.workload,
        packages=ours.PACKAGES,
        update=update,
        microbatch=batches,
    )


def microbatch(options: argparse.Namespace, kind: str) -> dict[str, int]:
    """Return rows, and stream sizes if prompts are shared, for a kind of lengths."""
    rows, shared, own = getattr(options, kind)
    return dict(
        row_tokens=options.row_tokens,
        rows_per_microbatch=rows,
        shared_tokens=shared,
        own_tokens=own,
    )


def measure_packing(options: argparse.Namespace) -> None:
    """Measure seconds of an epoch at the real lengths, with and without packing."""
    learner = Learner(make_config(options, rows_of(options)))
    ways = {
        packing: assembler(make_config(options, rows_of(options, packing=packing)))
        for packing in (True, False)
    }
    cut = updates(options.workload, rollout_groups(options.workload, "tail"))

    def epoch(packing: bool) -> int:
        learner.assemble = ways[packing]
        for groups in cut:
            learner.update(groups)
        return sum(work.completion_lengths())  # tokens of loss

    runs = [functools.partial(epoch, packing) for packing in (True, False)]
    timings = ours.alternate(runs, rounds=options.rounds)
    ours.show(
        dict(
            workload=options.workload, packed=timings[0], padded=timings[1],
            peak_rss_mb=work.peak_rss_mb(),
        )
    )  # fmt: skip


def row_of_segments(vocab: int, *, row_tokens: int, segment: int) -> PackedBatch:
    """Return one row filled with segments, all but the first token trained on."""
    rng = np.random.default_rng(work.SEED)
    sequences = [
        TrainSequence(
            tokens=rng.integers(work.EOS + 1, vocab, segment + 1, dtype=np.int32),
            prompt_length=1,
            weights=np.full(segment, 1.0 / row_tokens, np.float32),
            mask=np.ones(segment, bool),
            behavior_logprobs=np.full(segment, -np.log(vocab), np.float32),
            staleness=np.zeros(segment, np.int32),
        )
        for _ in range(row_tokens // segment)
    ]
    batch = pack(sequences, row_tokens=row_tokens, rows_per_microbatch=1).batch
    return dataclasses.replace(batch, advantages=np.ones_like(batch.advantages))


def measure_tokens(options: argparse.Namespace) -> None:
    """Measure seconds of a step on one row, in one segment and in many, by tokens."""
    rows = []
    for tokens in options.tokens:
        batch = dict(row_tokens=tokens, rows_per_microbatch=1)
        learner = Learner(make_config(options, batch, attention="blockwise"))
        runs = [
            timed_steps(
                learner,
                row_of_segments(
                    learner.arch.vocab_size, row_tokens=tokens, segment=segment
                ),
            )
            for segment in (tokens, SEGMENT)
        ]
        whole, cut = ours.alternate(runs, rounds=options.rounds)
        rows.append(dict(tokens=tokens, whole=whole, cut=cut))
    ours.show(dict(workload=options.workload, segment=SEGMENT, rows=rows))


def timed_steps(learner: Learner, batch: PackedBatch) -> Callable[[], int]:
    """Return a call that makes one optimizer step and returns the batch's positions."""

    def run() -> int:
        learner.train(batch)
        return batch.tokens.size

    return run


def plain_logprobs(
    hidden: jax.Array, weights: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the head's result, computed from all logits at once."""
    logprobs = jax.nn.log_softmax(head_logits(hidden, weights, float32_head=True))
    chosen = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
    return chosen, -(jnp.exp(logprobs) * logprobs).sum(axis=-1)


def measure_head(options: argparse.Namespace) -> None:
    """Measure time and temporary bytes of value and gradient, in chunks and at once."""
    shape = work.WORKLOADS[HEAD_WORKLOAD]
    head = Head(
        chunk_tokens=ON_A_CPU["head_chunk_tokens"],
        chunk_vocab=ON_A_CPU["head_chunk_vocab"],
    )
    ways = dict(chunked=functools.partial(token_logprobs, head=head),
                plain=plain_logprobs)  # fmt: skip
    rows = []
    for tokens in HEAD_TOKENS:
        keys = jax.random.split(jax.random.key(work.SEED), 3)
        arguments = (
            jax.random.normal(keys[0], (1, tokens, shape["hidden"])),
            0.02 * jax.random.normal(keys[1], (shape["vocab"], shape["hidden"])),
            jax.random.randint(keys[2], (1, tokens), 0, shape["vocab"]),
        )
        programs = {
            name: jax.jit(jax.value_and_grad(summed(logprobs), argnums=(0, 1)))
            .lower(*arguments)
            .compile()
            for name, logprobs in ways.items()
        }

        def run(program: Any, arguments: tuple = arguments) -> int:
            jax.block_until_ready(program(*arguments))
            return arguments[2].size

        runs = [functools.partial(run, program) for program in programs.values()]
        timings = ours.alternate(runs, rounds=options.rounds)
        for (name, program), timing in zip(programs.items(), timings, strict=True):
            rows.append(
                dict(
                    tokens=tokens,
                    way=name,
                    timings=timing,
                    temporary_bytes=temporary_bytes(program),
                )
            )
    ours.show(dict(workload=HEAD_WORKLOAD, rows=rows))


def summed(logprobs: Callable[..., tuple[jax.Array, jax.Array]]) -> Callable[..., Any]:
    """Return a scalar function; entropies are a metric, as in the train step."""

    def total(*arguments: jax.Array) -> jax.Array:
        chosen, entropies = logprobs(*arguments)
        return chosen.sum() + jax.lax.stop_gradient(entropies).sum()

    return total


def measure_remat(options: argparse.Namespace) -> None:
    """Measure time of an update and bytes of its microbatch, by remat policy."""
    learners = [
        Learner(make_config(options, rows_of(options), remat=remat)) for remat in REMAT
    ]
    groups = updates(REMAT_WORKLOAD, rollout_groups(REMAT_WORKLOAD, "dense"))[0]

    def run(learner: Learner) -> int:
        learner.update(groups)
        return work.UPDATE_SEQUENCES[REMAT_WORKLOAD] * (
            work.PROMPT_TOKENS + work.MAX_NEW_TOKENS
        )

    runs = [functools.partial(run, learner) for learner in learners]
    timings = ours.alternate(runs, rounds=options.rounds)
    rows = [
        dict(remat=name, timings=timing, temporary_bytes=learner.temporary_bytes())
        for name, timing, learner in zip(REMAT, timings, learners, strict=True)
    ]
    ours.show(dict(workload=REMAT_WORKLOAD, rows=rows))


def measure_product(options: argparse.Namespace) -> None:
    """Measure the fastest large float32 product, and the FLOPs of a dense token."""
    rng = np.random.default_rng(work.SEED)
    one, two = (rng.normal(size=(PRODUCT, PRODUCT)).astype(np.float32) for _ in "ab")
    multiply = jax.jit(jnp.matmul)
    here = jax.device_put((one, two))

    def xla() -> int:
        multiply(*here).block_until_ready()
        return PRODUCT

    def blas() -> int:
        one @ two
        return PRODUCT

    found = ours.alternate([xla, blas], rounds=PRODUCT_ROUNDS)
    seconds = min(timing["seconds"] for timings in found for timing in timings)
    context = (work.PROMPT_TOKENS + work.MAX_NEW_TOKENS) / 2
    forward = ours.architecture(options.workload).flops_per_token(context)
    ours.show(
        dict(
            peak_flops=2 * PRODUCT**3 / seconds,
            dense_flops_per_token=3 * forward,
            other_cores=max(t["other_cores"] for timings in found for t in timings),
        )
    )


COMMANDS = {
    "weights": ours.write_weights,
    "contender": contend,
    "packing": measure_packing,
    "tokens": measure_tokens,
    "head": measure_head,
    "remat": measure_remat,
    "product": measure_product,
}


def main() -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--workload", choices=work.WORKLOADS, default="W1")
    parser.add_argument("--weights", type=Path, help="Hugging Face directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8, help="of a microbatch")
    parser.add_argument("--row-tokens", type=int, default=288)
    for kind in work.KINDS:
        parser.add_argument(
            f"--{kind}",
            type=lambda text: [*map(int, text.split(","))],
            default=[8, 0, 0],
            help="rows, shared and own tokens of a microbatch (0: not shared)",
        )
    parser.add_argument("--tokens", type=lambda text: [*map(int, text.split(","))],
                        default=[], help="of the rows, comma-separated")  # fmt: skip
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # as the peers
    # As every command of the package does on a CPU.
    keep_freed_memory(ours.architecture(options.workload).num_params)
    COMMANDS[options.command](options)


if __name__ == "__main__":
    main()
