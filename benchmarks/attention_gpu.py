"""The learner's attention on a GPU: against dense attention, then time and memory.

    python benchmarks/attention_gpu.py

Prints relative errors of outputs and gradients (norm of the difference over the norm,
bfloat16 against float64 on the same inputs), then a table of forward and backward
passes: TFLOP/s are of the scores that the segments need.  Without a GPU it says so.
"""

import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from scalerl_jax.model.attention import BlockwiseAttention, SegmentAttention
from scalerl_jax.model.attention_kernels import CudnnAttention
from scalerl_jax.parallel.mesh import make_mesh

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import dense_attention  # type: ignore[import]  # the tests' float64 reference

SHAPE = (
    2,
    8192,
    32,
    8,
    128,
)  # rows, tokens, heads, kv heads and head_dim of an 8B model
HEADS = ((128, 4), (128, 1), (64, 2))  # head_dim, kv heads; of 4 heads


def both_passes(attention: SegmentAttention) -> Any:
    """Return a compiled function of q, k, v, ids and a cotangent."""

    def run(q: Any, k: Any, v: Any, ids: Any, cotangent: Any) -> Any:
        found, back = jax.vjp(lambda *x: attention(*x, ids), q, k, v)
        return found, back(cotangent)

    return jax.jit(run)


def errors(attention: SegmentAttention, dim: int, kv_heads: int) -> list[float]:
    """Return relative errors of the output and of the gradients by q, k and v."""
    rng = np.random.default_rng(0)
    given = dense_attention.random_inputs(
        rng, rows=6, length=512, heads=4, kv_heads=kv_heads, dim=dim
    )
    ids = dense_attention.rows_of_segments(rng, 6, 512)
    ids[2], ids[3] = 0, 1  # a row of padding, and one segment
    q, k, v, cotangent = (jnp.asarray(x, jnp.bfloat16) for x in given)
    real = (ids > 0)[..., None, None]
    cotangent = jnp.where(real, cotangent, 0)
    inputs = [np.asarray(x, np.float32) for x in (q, k, v)]
    expected, slopes = dense_attention.attend(
        *inputs, ids, np.asarray(cotangent, np.float32)
    )
    found, gradients = both_passes(attention)(q, k, v, jnp.asarray(ids), cotangent)
    pairs = [
        (jnp.where(real, found, 0), expected * real),
        *zip(gradients, slopes, strict=True),
    ]
    return [
        float(np.linalg.norm(np.asarray(ours, np.float64) - theirs))
        / float(np.linalg.norm(theirs))
        for ours, theirs in pairs
    ]


def speed(attention: SegmentAttention, counts: Sequence[int]) -> list[str]:
    """Return GiB of temporaries, then ms and TFLOP/s for each number of segments."""
    rows, length, heads, kv_heads, dim = SHAPE
    q, k, v, cotangent = (
        jax.random.normal(
            jax.random.key(place), (rows, length, each, dim), jnp.bfloat16
        )
        for place, each in enumerate((heads, kv_heads, kv_heads, heads))
    )
    ids = jnp.ones((rows, length), jnp.int32)
    run = both_passes(attention).lower(q, k, v, ids, cotangent).compile()
    cells = [f"{run.memory_analysis().temp_size_in_bytes / 2**30:.2f}"]
    for count in counts:
        ids = jnp.arange(length, dtype=jnp.int32) * count // length + 1
        ids = jnp.broadcast_to(ids, (rows, length))
        jax.block_until_ready(run(q, k, v, ids, cotangent))
        times = []
        for _ in range(5):
            started = time.perf_counter()
            jax.block_until_ready(run(q, k, v, ids, cotangent))
            times.append(time.perf_counter() - started)
        median = float(np.median(times))
        # Two products of a token with half of its segment; the backward pass has five.
        flops = 3.5 * 2 * 2 * rows * heads * dim * length**2 / 2 / count
        cells.append(f"{median * 1e3:.2f} ({flops / median / 1e12:.0f})")
    return cells


def candidates(mesh: Mesh) -> dict[str, SegmentAttention]:
    """Return what is compared, by name."""
    cudnn = functools.partial(CudnnAttention, mesh)
    blockwise = functools.partial(BlockwiseAttention, mesh)
    return {
        **{f"cudnn, {n} segments a row": cudnn(n) for n in (8, 16, 32)},
        **{f"blockwise, blocks of {n}": blockwise(block=n) for n in (512, 1024)},
    }


def main() -> None:
    """Print both tables."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"no GPU: {device.device_kind}; nothing is measured")
        return
    print(f"{device.device_kind}, JAX {jax.__version__}")
    named = candidates(make_mesh([device]))
    for dim, kv_heads in HEADS:
        for name in ("cudnn, 16 segments a row", "blockwise, blocks of 512"):
            found = " ".join(
                f"{each:.1e}" for each in errors(named[name], dim, kv_heads)
            )
            print(f"head_dim {dim}, {kv_heads} kv heads, {name}: {found}")
    print(f"\nrows, tokens, heads, kv heads, head_dim: {SHAPE}")
    print("| attention | temporaries, GiB | 1 segment, ms (TFLOP/s) | 8 segments |")
    print("|---|---:|---:|---:|")
    for name, attention in named.items():
        print(f"| {name} | {' | '.join(speed(attention, (1, 8)))} |", flush=True)


if __name__ == "__main__":
    main()
