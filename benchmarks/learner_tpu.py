"""Measure what attention skips and the head costs in a train step on TPUs.

    python benchmarks/learner_tpu.py                     # all four parts
    python benchmarks/learner_tpu.py --only=blocks,mismatch

Nothing runs on a TPU.  The first part counts blocks of packed rows.  The second, which
needs `pip install -e ".[tpu]"`, compiles the gradient of all log-probabilities for one
and prints libtpu's estimates of the head's products.  The third computes the head's
gradients from operands of 16 and of 24 bits.  The fourth samples held-out
prompts of the demo in bfloat16, and the learner computes the log-probabilities of the
sampled tokens, and their gradients, with weights that are rounded or not.
"""

import argparse
import itertools
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from routing import Bench

from scalerl_jax import config as config_lib
from scalerl_jax.controller.mismatch import MismatchCheck
from scalerl_jax.learner.forward import plain_scorer
from scalerl_jax.learner.head import Head
from scalerl_jax.learner.logprobs import token_logprobs
from scalerl_jax.model.layers import HIDDEN, TABLE, TOKENS
from scalerl_jax.model.products import by_terms
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.model.transformer import head_weights
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.planning.lengths import assumed_lengths, attention_share, count_rows
from scalerl_jax.preflight.__main__ import ENVIRONMENT
from scalerl_jax.preflight.hlo import above_default
from scalerl_jax.preflight.topologies import parse_topology

CONFIGS = Path(__file__).parents[1] / "configs"
ROUNDED = ("float32", "bfloat16")  # model.head_weights_dtype


def say(*cells: Any, rule: bool = False) -> None:
    """Print a row of a table, with a rule below a heading."""
    print(f"| {' | '.join(map(str, cells))} |")
    if rule:
        print("|" + "---|" * len(cells))
    sys.stdout.flush()


def blocks() -> None:
    """Print the shares of blocks that attention computes for batches of configs."""
    say("config", "rows", "one row at a time", "8 shards", "32", "64", rule=True)
    for name in ("8b", "32b", "8b_32k"):
        settings = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
        config = config_lib.resolve(settings)
        lengths = assumed_lengths(config)
        packed: Any = dict(
            rollouts=config.batch.num_prompts * config.batch.group_size,
            row_tokens=config.batch.row_tokens,
            row_segments=config.batch.packed_segments,
        )
        shares = [
            f"{attention_share(lengths, **packed, rows=count, shards=count):.3f}"
            for count in (1, 8, 32, 64)
        ]
        say(name, count_rows(lengths, **packed), *shares)


def products() -> None:
    """Print libtpu's estimates for the head's products, in millions of cycles."""
    say("chip", "weights", "cycles of each product of a tile", "together", rule=True)
    for chip, topology in (
        ("v5p", "v5p:2x2x1"),
        ("v5e", "v5e:2x2"),
        ("v6e", "v6e:2x2"),
    ):
        for dtype in ROUNDED:
            text = _compiled_head(parse_topology(topology).devices(), dtype)
            found = [
                int(cycles[1]) / 1e6
                for line in text.splitlines()
                if "fusion(" in line and _multiplies(line, text)
                if (cycles := re.search(r'estimated_cycles":"(\d+)"', line))
            ]
            each = ", ".join(f"{cycles:.2f}" for cycles in found)
            say(chip, dtype, each, f"{sum(found):.2f}")


def _multiplies(line: str, text: str) -> bool:
    """Return True if an instruction is a fusion with a product above the default."""
    called = re.search(r"calls=(%[\w.-]+)", line)
    if not called:
        return False
    body = text[text.index(f"\n{called[1]} (") :].split("\n}", 1)[0]
    return bool(above_default(body))


def _compiled_head(devices: list[Any], weights_dtype: str) -> str:
    """Return the program of log-probabilities of an 8B model and their gradients."""
    mesh = make_mesh(devices, fsdp=len(devices))
    head = Head(mesh=mesh, weights_dtype=jnp.dtype(weights_dtype))
    arch = ARCHITECTURES["llama3.1-8b"]
    rows = (len(devices), 4096)

    def array(shape: tuple[int, ...], dtype: Any, spec: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def gradients(hidden: Any, weights: Any, targets: Any, cotangent: Any) -> Any:
        def logprobs(hidden: Any, weights: Any) -> Any:
            found: Any = token_logprobs(hidden, weights, targets, head)
            return found[0]

        found, back = jax.vjp(logprobs, hidden, weights)
        return found, back(cotangent)

    arguments = (
        array((*rows, arch.hidden_size), jnp.bfloat16, HIDDEN),
        array((arch.vocab_size, arch.hidden_size), jnp.float32, TABLE),
        array(rows, jnp.int32, TOKENS),
        array(rows, jnp.float32, TOKENS),
    )
    return jax.jit(gradients).lower(*arguments).compile().as_text() or ""


def terms() -> None:
    """Print errors of the head's gradients, against float64, by the terms of operands.

    The loss is a normally distributed advantage times the log-probability of a token
    that was drawn from logits with a spread of 3, for bfloat16 hidden states.
    """
    rng = np.random.default_rng(0)
    tokens, width, vocabulary = 256, 1024, 16_384
    exact = rng.standard_normal((tokens, width))
    hidden = jnp.asarray(exact, jnp.bfloat16)
    weights = jnp.float32(rng.standard_normal((vocabulary, width)) * 3 * width**-0.5)

    def shares(hidden: Any) -> Any:
        logits = hidden @ np.float64(weights).T
        found = np.exp(logits - logits.max(axis=1, keepdims=True))
        return found / found.sum(axis=1, keepdims=True)

    rounded = np.float64(np.asarray(hidden, np.float32))
    drawn = (shares(rounded).cumsum(axis=1) > rng.random((tokens, 1))).argmax(axis=1)
    advantages = rng.standard_normal((tokens, 1))

    def of_logits(hidden: Any) -> Any:
        return (np.eye(vocabulary)[drawn] - shares(hidden)) * advantages

    slope = of_logits(rounded)
    right = slope @ np.float64(weights), slope.T @ rounded
    say("head's gradients, relative error", "hidden states", "weights", rule=True)

    def row(name: str, *found: Any) -> None:
        errors = [
            np.linalg.norm(np.float64(one) - other) / np.linalg.norm(other)
            for one, other in zip(found, right, strict=True)
        ]
        say(name, *(f"{error:.1e}" for error in errors))

    cotangent = jnp.float32(slope)
    for count in (3, 2, 1):
        by_hidden = by_terms("cv,vd->cd", cotangent, weights, terms=count)
        by_weights = by_terms("cv,cd->vd", cotangent, hidden, terms=count)
        row(f"bfloat16 terms of a float32 operand: {count}", by_hidden, by_weights)
    kept = right[0].astype(jnp.bfloat16).astype(np.float64)
    other = of_logits(exact)
    row("exact, that of hidden states rounded to bfloat16", kept, right[1])
    row("exact, of hidden states before they are rounded", other @ np.float64(weights),
        other.T @ exact)  # fmt: skip


def mismatch() -> None:
    """Print sampler against learner, and rounded weights against float32 ones."""
    say("activations", "weights", "tokens", "mean abs dlogp", "max", "KL", rule=True)
    found: dict[str, Any] = {}
    sampled: list[Any] = []
    for compute, dtype in itertools.product(("bfloat16", "float32"), ROUNDED):
        bench = Bench.of(
            str(CONFIGS / "tiny.py"),
            32,
            **{
                "model.sampler_dtype": "bfloat16",
                "model.compute_dtype": compute,
                "model.head_weights_dtype": dtype,
            },
        )
        sampled = sampled or bench.sampled  # the learner alone differs
        check = MismatchCheck(
            score=plain_scorer(bench.forward),
            pack=bench.pack,
            max_mismatch_nats=float("inf"),
        )
        each = check(bench.params, sampled)
        say(compute, dtype, f"{each.tokens:,}", f"{each.mean_abs:.5f}",
            f"{each.max_abs:.4f}", f"{each.kl:.2e}")  # fmt: skip
        if compute == "bfloat16":
            bench.__dict__["sampled"] = sampled
            found[dtype] = _scores_and_gradient(bench)
    print()
    say("rounded against float32 weights", "", rule=True)
    difference = found["bfloat16"][0] - found["float32"][0]
    for share in (50, 90, 99, 100):
        value = np.percentile(np.abs(difference), share)
        say(f"abs dlogp, percentile {share}", f"{value:.5f}")
    say("mean of dlogp", f"{difference.mean():.1e}")
    for name, one, other in zip(
        ("hidden states", "head"),
        found["bfloat16"][1],
        found["float32"][1],
        strict=True,
    ):
        error = np.linalg.norm(one - other) / np.linalg.norm(other)
        say(f"gradient of the {name}, relative error", f"{error:.5f}")


def _scores_and_gradient(bench: Bench) -> tuple[Any, list[Any]]:
    """Return log-probabilities, and the gradients of their sum for a microbatch."""
    batch, forward = bench.batch(), bench.forward
    mask = np.asarray(batch.mask)
    scores = np.asarray(plain_scorer(forward)(bench.params, batch))[mask]
    first = jax.tree.map(lambda leaf: leaf[0], batch)
    weights = head_weights(bench.params)

    @jax.jit
    def gradients(hidden: Any, weights: Any) -> Any:
        def total(hidden: Any, weights: Any) -> Any:
            found: Any = token_logprobs(hidden, weights, first.targets, forward.head)
            return jnp.where(first.mask, found[0], 0.0).sum()

        found: Any = jax.grad(total, argnums=(0, 1))(hidden, weights)
        return found

    hidden = jax.jit(forward.hidden)(bench.params, first)
    return scores, [np.asarray(x, np.float64) for x in gradients(hidden, weights)]


def main() -> None:
    """Print the parts that are asked for."""
    parts = {
        "blocks": blocks,
        "products": products,
        "terms": terms,
        "mismatch": mismatch,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(parts), help="parts, with commas")
    for name in parser.parse_args().only.split(","):
        print(f"\n## {name}\n")
        parts[name]()


if __name__ == "__main__":
    os.environ |= ENVIRONMENT | {"JAX_ENABLE_COMPILATION_CACHE": "true"}
    main()
