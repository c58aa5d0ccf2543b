"""Mismatch by number formats and by routing, the effect of replay, a mixture's cost.

    python benchmarks/routing.py                    # all parts
    python benchmarks/routing.py --only=mismatch
    python benchmarks/routing.py --only=formats --dense=configs/studies/base.py
    python benchmarks/routing.py --runs runs/on runs/off    # draws docs/routing.png

The first part samples held-out prompts in bfloat16.  The learner, with the same
weights, then computes its choice of experts and the log-probability of each sampled
token, with the sampler's experts and with its own.  The second part times sampling and
the gradient of a mixture and of the dense model of its active size, in turns.  The
third compares sampler and learner of the dense model in several number formats.  Prints
a table each.  With --runs it draws runs that differ in `objective.routing_replay`
instead.
"""

import argparse
import dataclasses
import functools
import json
import runpy
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot
from seeds import processor, rows

from scalerl_jax import config as config_lib
from scalerl_jax.batching.assembly import Pack
from scalerl_jax.config import Config
from scalerl_jax.controller.mismatch import Mismatch, MismatchCheck, as_sequence
from scalerl_jax.generation.evaluation import Probe
from scalerl_jax.learner.forward import Forward, plain_scorer
from scalerl_jax.learner.publish import make_snapshot
from scalerl_jax.model.architecture import param_shardings
from scalerl_jax.model.weights import load_params
from scalerl_jax.objective.assembly import make_pack
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.types import PackedBatch, PyTree
from scalerl_jax.wiring.learning import make_architecture, make_forward
from scalerl_jax.wiring.prompts import load_prompts
from scalerl_jax.wiring.sampling import (
    make_checked_tokenizer,
    make_distribution,
    make_engine,
    make_sampler,
    make_samples_of,
    weights_format,
)

# Of the learner's activations, of the sampler, and whether the head is float32; of the
# KV cache and of the sampler's matrices, where they are not the sampler's.
FORMATS = (
    ("float32", "float32", True, "model", "model"),
    ("float32", "bfloat16", True, "model", "model"),
    ("float32", "bfloat16", False, "model", "model"),
    ("float32", "bfloat16", True, "int8", "model"),
    ("float32", "bfloat16", True, "model", "int8"),
    ("float32", "bfloat16", True, "int8", "int8"),
    ("bfloat16", "bfloat16", True, "model", "model"),
    ("bfloat16", "bfloat16", False, "model", "model"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Policy, sampler and learner of a config on one device, without a run."""

    config: Config
    prompts: int

    @classmethod
    def of(cls, file: str, prompts: int, **changes: Any) -> "Bench":
        """Read a config file, with these settings."""
        settings = runpy.run_path(file)["get_config"]()
        settings.update_from_flattened_dict(changes)
        return cls(config=config_lib.resolve(settings), prompts=prompts)

    @functools.cached_property
    def arch(self) -> Any:
        """The architecture of the checkpoint."""
        return make_architecture(self.config)

    @functools.cached_property
    def mesh(self) -> Any:
        """The mesh of one device, for both roles."""
        return make_mesh(jax.devices()[:1])

    @functools.cached_property
    def params(self) -> PyTree:
        """The learner's params."""
        return load_params(
            self.config.model.checkpoint,
            self.arch,
            dtype=jnp.float32,
            shardings=param_shardings(self.arch, self.mesh),
        )

    @functools.cached_property
    def sampled(self) -> list:
        """The first result of `sample`."""
        return self.sample()

    @functools.cached_property
    def _probe(self) -> Probe:
        config = self.config
        tokenizer = make_checked_tokenizer(config, self.arch)
        prompts = load_prompts(config, tokenizer).held_out
        return Probe(
            make_sampler=functools.partial(
                make_sampler,
                PagePool(make_engine(config, self.arch, tokenizer, self.mesh)),
            ),
            prompts=prompts[: self.prompts],
            sampling=make_distribution(config),
            make_samples=make_samples_of(config, "eval", config.batch.group_size),
        )

    @functools.cached_property
    def _published(self) -> PyTree:
        form = weights_format(self.config)
        copy = make_snapshot(self.arch, learner_mesh=self.mesh, **form)
        return copy(self.params)

    def sample(self) -> list:
        """Return prompts with their completions."""
        return self._probe(self._published)

    @functools.cached_property
    def pack(self) -> Pack:
        """The layout of a train step."""
        return make_pack(self.config, self.arch)[0]

    @functools.cached_property
    def forward(self) -> Forward:
        """The learner's forward pass."""
        return make_forward(self.config, self.arch, self.mesh)

    def batch(self) -> PackedBatch:
        """All completions as the learner reads them."""
        return self.pack([as_sequence(*each) for each in self.sampled]).batch

    def mismatch(self) -> Mismatch:
        """Return how far the log-probabilities of sampler and learner are apart."""
        check = MismatchCheck(
            score=plain_scorer(self.forward),
            pack=self.pack,
            max_mismatch_nats=float("inf"),
        )
        return check.require(self.params, self.sampled)


def routed_apart(bench: Bench) -> tuple[float, float]:
    """Return shares of (token, layer) and of tokens whose experts the learner changes.

    A token counts where the sampler has chosen experts, whose order does not matter.
    """

    @jax.jit
    def choose(params: PyTree, batch: PackedBatch) -> jax.Array:
        _, said = bench.forward.states(params, batch)
        return jnp.moveaxis(said["experts"], 0, 2)

    batch, apart, there = bench.batch(), [], []
    for index in range(len(batch.tokens)):
        part = jax.tree.map(lambda leaf, at=index: leaf[at], batch)
        own = choose(bench.params, dataclasses.replace(part, experts=None))
        given = part.experts
        assert given is not None, "objective.routing_replay is on"
        there.append((given != np.iinfo(given.dtype).max).all(axis=-1))
        apart.append((np.sort(own, axis=-1) != np.sort(given, axis=-1)).any(axis=-1))
    known, other = np.stack(there), np.stack(apart) & np.stack(there)
    return other.sum() / known.sum(), other.any(-1).sum() / known.any(-1).sum()


def mismatch(options: argparse.Namespace) -> None:
    """Print the mismatch of sampler and learner, for learners of two precisions."""
    print("| learner | tokens | (token, layer) apart | tokens apart | replay "
          "| mean abs dlogp | max | KL |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        bench = Bench.of(
            options.config,
            options.prompts,
            **{
                "model.sampler_dtype": "bfloat16",
                "model.compute_dtype": dtype,
                "objective.routing_replay": "on",
            },
        )
        found = bench.mismatch()
        assert found.unreplayed is not None, "there are experts"
        layers, tokens = routed_apart(bench)
        for name, each in (("off", found.unreplayed), ("on", found)):
            print(
                f"| {dtype} | {each.tokens:,} | {layers:.2%} | {tokens:.1%} | {name} "
                f"| {each.mean_abs:.5f} | {each.max_abs:.3f} | {each.kl:.2e} |"
            )


def formats(options: argparse.Namespace) -> None:
    """Print the mismatch of the dense model by formats of learner, sampler, head."""
    print("| learner | sampler | float32 head | KV cache | matrices | tokens "
          "| mean abs dlogp | max | KL |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for learner, sampler, head, cache, matrices in FORMATS:
        found = Bench.of(
            options.dense,
            options.prompts,
            **{
                "model.compute_dtype": learner,
                "model.sampler_dtype": sampler,
                "model.float32_head": head,
                "sampler.kv_dtype": cache,
                "sampler.weights_dtype": matrices,
            },
        ).mismatch()
        print(
            f"| {learner} | {sampler} | {'yes' if head else 'no'} "
            f"| {sampler if cache == 'model' else cache} "
            f"| {sampler if matrices == 'model' else matrices} | {found.tokens:,} "
            f"| {found.mean_abs:.2e} | {found.max_abs:.2e} | {found.kl:.1e} |"
        )


def timed(work: Any) -> float:
    """Return the seconds that `work` takes."""
    begun = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - begun


def throughput(options: argparse.Namespace) -> None:
    """Print tokens per second of the mixture and of the dense model, in turns."""
    benches, gradients = {}, {}
    for name, file in (("dense", options.dense), ("mixture", options.config)):
        bench = Bench.of(file, options.prompts)
        batch = jax.tree.map(lambda leaf: leaf[0], bench.batch())

        def loss(
            params: PyTree, batch: PackedBatch, forward: Forward = bench.forward
        ) -> jax.Array:
            return forward.logprobs(params, batch)[0].sum()

        program = jax.jit(jax.grad(loss))
        gradients[name] = functools.partial(program, bench.params, batch)
        benches[name] = (bench, int((batch.segment_ids > 0).sum()))
        jax.block_until_ready(gradients[name]())  # compiled, as sampling is by now
    print("| model | parameters | active | sampled tokens / s | learner's tokens / s |")
    print("|---|---|---|---|---|")
    seconds = {name: ([], []) for name in benches}
    for _ in range(options.repeats):
        for name, (bench, _) in benches.items():
            seconds[name][0].append(timed(bench.sample))
            seconds[name][1].append(timed(gradients[name]))
    for name, (bench, row_tokens) in benches.items():
        sampled = sum(len(each.tokens) for _, each in bench.sampled)
        of_sampling, of_learning = map(statistics.median, seconds[name])
        print(
            f"| {name} | {bench.arch.num_params:,} | {bench.arch.num_active_params:,} "
            f"| {sampled / of_sampling:,.0f} | {row_tokens / of_learning:,.0f} |"
        )


def draw(runs: list[Path], picture: Path) -> None:
    """Draw pass rates, and the mismatch of sampler and learner at one version.

    The mismatch is over each evaluation's few hundred tokens, a point each.
    """
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    seen = set()
    for run in runs:
        said = json.loads((run / "config.json").read_text())
        replay = said["config"]["objective"]["routing_replay"]
        color, aside = {"on": ("C0", 0.7), "off": ("C3", -0.7)}[replay]
        label = None if replay in seen else f"replay {replay}"
        seen.add(replay)
        evals = rows(run / "evals.jsonl")
        steps = [row["step"] for row in evals]
        style: Any = dict(color=color, label=label, markersize=3.5)
        left.plot(steps, [row["pass_rate"] for row in evals], "o-", **style)
        right.semilogy(
            [step + aside for step in steps],
            [row["mismatch/kl"] for row in evals],
            "o",
            **style,
        )
    left.set_ylabel("pass rate on held-out prompts")
    right.set_ylabel("KL of sampler and learner, nats")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


PARTS = {"mismatch": mismatch, "throughput": throughput, "formats": formats}


def main() -> None:
    """Print the requested tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="configs/tiny_moe.py")
    parser.add_argument("--dense", default="configs/tiny.py")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--runs", nargs="*", type=Path, default=[])
    options = parser.parse_args()
    if options.runs:
        docs = Path(__file__).resolve().parents[1] / "docs"
        draw(options.runs, docs / "routing.png")
        return
    for name, part in PARTS.items():
        if options.only in (None, name):
            part(options)
            print()
    print(f"{processor()}, JAX {jax.__version__}")


if __name__ == "__main__":
    main()
