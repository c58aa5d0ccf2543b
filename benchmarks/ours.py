"""Shared parts of our side of both benchmarks: the model of a workload, the output."""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peers import work

from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.saving import save_params
from scalerl_jax.model.transformer import init_params

PACKAGES = ("jax", "jaxlib", "numpy")


def architecture(workload: str) -> Architecture:
    """Return the decoder of a workload."""
    shape = work.WORKLOADS[workload]
    return Architecture(
        family="qwen3",
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        ffn_size=shape["ffn"],
        num_layers=shape["layers"],
        num_heads=shape["heads"],
        num_kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        rope_theta=work.ROPE_THETA,
        rms_eps=work.NORM_EPS,
        tied_embeddings=True,
        max_positions=1024,  # above every prompt and completion of the peers' work
        qk_norm=True,
    )


def write_weights(options: argparse.Namespace) -> None:
    """Write random float32 weights as a Hugging Face directory, for all contenders."""
    arch = architecture(options.workload)
    params = init_params(arch, jax.random.key(work.SEED), dtype=jnp.float32)
    save_params(options.weights, params, arch, dtype=np.float32)
    show(dict(workload=options.workload, parameters=arch.num_params))


def alternate(
    runs: Sequence[Callable[[], int]], *, rounds: int
) -> list[list[dict[str, float]]]:
    """Return `rounds` timings of each run, in turns; a first round is not counted."""
    timings: list[list[dict[str, float]]] = [[] for _ in runs]
    for _ in range(rounds + 1):
        for run, list_of_run in zip(runs, timings, strict=True):
            list_of_run.append(work.timed(run))
    return [list_of_run[1:] for list_of_run in timings]


def show(line: dict[str, Any]) -> None:
    """Print the one JSON line of a command."""
    print(json.dumps(line | dict(versions=work.versions(PACKAGES))), flush=True)
