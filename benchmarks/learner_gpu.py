"""One train step of a large shape on one GPU: its time and its model FLOPs.

    python benchmarks/learner_gpu.py --model=1B --tokens=4096

Prints one JSON line; without a GPU the line says so, and nothing is measured.
"""

import argparse
import dataclasses
from typing import Any

import jax
import ours
from learner_ours import Learner, make_config, row_of_segments, timed_steps

from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.model.transformer import REMAT

# float32 master weights, two moments, and gradients twice while they are added up:
# 20 bytes per parameter.  Eight layers of the second take 56 GB, all of them 160 GB.
MODELS: dict[str, Architecture] = {
    # meta-llama/Llama-3.2-1B, config.json; its rotary scaling left out
    "1B": Architecture(
        family="llama",
        vocab_size=128_256,
        hidden_size=2048,
        ffn_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rope_theta=500_000.0,
        rms_eps=1e-5,
        tied_embeddings=True,
        max_positions=131_072,
    ),
    "8B": ARCHITECTURES["llama3.1-8b"],
}
LAYERS = {"1B": 16, "8B": 8}


def measure(options: argparse.Namespace, arch: Architecture) -> dict[str, Any]:
    """Return times and peak memory of a bfloat16 step on one row of one segment."""
    config = make_config(
        options,
        dict(row_tokens=options.tokens, rows_per_microbatch=1),
        scan_layers=True,
        head_chunk_tokens=1024,
        head_chunk_vocab=16384,
        compute_dtype="bfloat16",
        remat=options.remat,
        float32_head=options.float32_head,
    )
    try:
        learner = Learner(config, arch)
        batch = row_of_segments(
            arch.vocab_size, row_tokens=options.tokens, segment=options.tokens
        )
        (timings,) = ours.alternate(
            [timed_steps(learner, batch)], rounds=options.rounds
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return dict(timings=None)
    stats = jax.local_devices()[0].memory_stats() or {}
    return dict(timings=timings, peak_bytes=stats.get("peak_bytes_in_use"))


def main() -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="1B")
    parser.add_argument("--layers", type=int, help="instead of the usual number")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--remat", choices=REMAT, default="none")
    parser.add_argument("--float32-head", action=argparse.BooleanOptionalAction,
                        default=True)  # fmt: skip
    parser.add_argument("--any-backend", action="store_true", help="without a GPU too")
    options = parser.parse_args()
    options.weights = None  # random ones, made on the device
    whole = MODELS[options.model]
    layers = options.layers or LAYERS[options.model]
    arch = dataclasses.replace(whole, num_layers=layers)
    line = dict(
        backend=jax.default_backend(),
        device=jax.devices()[0].device_kind,
        model=options.model,
        layers=layers,
        of_layers=whole.num_layers,
        parameters=arch.num_params,
        tokens=options.tokens,
        remat=options.remat,
        float32_head=options.float32_head,
        # Backward is twice forward; what remat computes again is not counted.
        flops=3 * options.tokens * arch.flops_per_token((options.tokens + 1) / 2),
    )
    if line["backend"] == "gpu" or options.any_backend:
        line |= measure(options, arch)
    ours.show(line)


if __name__ == "__main__":
    main()
