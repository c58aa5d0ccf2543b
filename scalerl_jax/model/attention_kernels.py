"""Segment attention by kernels from JAX, and the choice among them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.attention import (
    KEYS,
    QUERIES,
    SAVED,
    BlockwiseAttention,
    SegmentAttention,
)
from scalerl_jax.parallel.mesh import ROWS, largest_divisor, over_mesh

_LANES = 128  # of a TPU's vector; the kernel's blocks are multiples of it
_MOST_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class SplashAttention:
    """JAX's splash attention, a Mosaic kernel for TPUs, causal with segments."""

    mesh: Mesh
    heads: int
    interpret: bool = False  # on any device, slowly: for tests

    def __call__(
        self,
        q: Float[Array, "R S heads dim"],
        k: Float[Array, "R S kv dim"],
        v: Float[Array, "R S kv dim"],
        segment_ids: Int[Array, "R S"],
    ) -> Float[Array, "R S heads dim"]:
        """Return causal attention within each segment."""
        length, shards = q.shape[1], self.mesh.shape["context"]
        # The largest multiple of a vector's lanes that divides a shard.
        vectors = largest_divisor(length // shards // _LANES, _MOST_BLOCK // _LANES)
        blocks: Any = (vectors * _LANES,) * 8  # of queries and of keys, in every pass
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([masks.CausalMask((length, length))] * self.heads),
            block_sizes=splash.BlockSizes(*blocks),
            head_shards=self.mesh.shape["tensor"],
            q_seq_shards=shards,
            residual_checkpoint_name=SAVED,
            interpret=self.interpret,
        )
        over = NamedSharding(self.mesh, PartitionSpec("tensor", "context"))

        def local(
            kernel: splash.SplashAttentionKernel,
            q: Array,
            k: Array,
            v: Array,
            of_queries: Array,
            of_keys: Array,
        ) -> Array:
            q, k, v = (x.swapaxes(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
            segments = splash.SegmentIds(q=of_queries, kv=of_keys)
            found: Any = jax.vmap(kernel)(q, k, v, segments)
            return found.swapaxes(1, 2)

        segments = (PartitionSpec(ROWS, "context"), PartitionSpec(ROWS, None))
        specs = (kernel.manual_sharding_spec(over), QUERIES, KEYS, KEYS, *segments)
        run = over_mesh(self.mesh, local, in_specs=specs, out_specs=QUERIES)
        return run(kernel, q, k, v, segment_ids, segment_ids)


# From here on JAX finds the keys of grouped heads in packed rows; before, it took the
# stride of the queries: https://github.com/jax-ml/jax/pull/39521
_GROUPED = (0, 11, 1)


@dataclasses.dataclass(frozen=True)
class CudnnAttention:
    """cuDNN's flash attention, through JAX, with the segments' positions.

    Its backward pass reserves 8 bytes of memory per row, segment, token, head and
    dimension of a head, also for segments that a row does not have.
    """

    mesh: Mesh
    segments: int  # of a row, at most

    def __call__(
        self,
        q: Float[Array, "R S heads dim"],
        k: Float[Array, "R S kv dim"],
        v: Float[Array, "R S kv dim"],
        segment_ids: Int[Array, "R S"],
    ) -> Float[Array, "R S heads dim"]:
        """Return causal attention within each segment; 0 on padding."""

        def local(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
            lengths, offsets = segment_places(segment_ids, self.segments)
            # Where no segment is, cuDNN writes nothing: neither outputs nor gradients.
            real = functools.partial(jnp.where, (segment_ids > 0)[..., None, None])
            if jax.__version_info__ < _GROUPED:
                k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
            q, k, v = (real(x, 0) for x in (q, k, v))
            # The public jax.nn.dot_product_attention does not support segments.
            found: Any = cudnn.dot_product_attention(
                q,
                k,
                v,
                q_seqlen=lengths,
                kv_seqlen=lengths,
                q_offsets=offsets,
                kv_offsets=offsets,
                scale=q.shape[-1] ** -0.5,
                mask_type=cudnn.MaskType.PADDING_CAUSAL,
            )
            return real(found, 0)

        specs = (QUERIES, KEYS, KEYS, PartitionSpec(ROWS, None))
        return over_mesh(self.mesh, local, specs, QUERIES)(q, k, v, segment_ids)


def segment_places(
    segment_ids: Int[Array, "R S"], segments: int
) -> tuple[Int[Array, "R segments"], Int[Array, "R segments+1"]]:
    """Return length and first position of every segment of a row; -1 for no segment.

    A row's segments 1, 2, ... are laid end to end from its first position.  JAX joins
    the rows' lists without their -1, so that each has as many positions as lengths;
    the last column is only for the end that JAX adds.
    """
    numbers = jnp.arange(1, segments + 1)
    lengths = (segment_ids[:, None, :] == numbers[:, None]).sum(axis=-1)
    starts = jnp.where(lengths > 0, jnp.cumsum(lengths, axis=1) - lengths, -1)
    starts = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
    lengths = jnp.where(lengths > 0, lengths, -1)
    return lengths.astype(jnp.int32), starts.astype(jnp.int32)


_OF_PLATFORM = {"tpu": "splash", "gpu": "cudnn"}  # the kernels that "auto" tries


def why_not(
    name: str, *, arch: Architecture, mesh: Mesh, dtype: DTypeLike, row_tokens: int
) -> str | None:
    """Return the setting that an attention refuses, and the way out; None: it fits.

    The arguments are those of `choose_attention`; `name` is not "auto".
    """
    platform, dim = mesh.devices.flat[0].platform, arch.head_dim
    shards, kind = mesh.shape["context"], jnp.dtype(dtype)
    windows = arch.windows_within(row_tokens)
    narrow: list[tuple[bool, str]] = [
        (arch.sinks, "a model whose heads have sinks"),
        (arch.attention_cap > 0, "a model whose attention scores have a soft cap"),
        (
            bool(windows),
            f"a model whose layers see windows of {max(windows, default=0)} tokens "
            f"with batch.row_tokens = {row_tokens}",
        ),
    ]
    limits: dict[str, list[tuple[bool, str]]] = {
        "blockwise": [],
        "splash": [
            *narrow,
            (platform != "tpu", f"{platform} devices: it needs TPUs"),
            (
                bool(dim % _LANES),
                f"a model of head_dim = {dim}: it must be a multiple of {_LANES}",
            ),
            (
                bool(row_tokens % (_LANES * shards)),
                f"batch.row_tokens = {row_tokens} over mesh.context = {shards}: a "
                f"shard must be a multiple of {_LANES} tokens; change batch.row_tokens",
            ),
        ],
        "cudnn": [
            *narrow,
            (platform != "gpu", f"{platform} devices: it needs GPUs"),
            (
                kind not in (jnp.bfloat16, jnp.float16),
                f"model.compute_dtype = {kind}: set it to 'bfloat16'",
            ),
            (
                dim % 8 > 0 or dim > 128,
                f"a model of head_dim = {dim}: a multiple of 8 up to 128",
            ),
            (shards > 1, f"mesh.context = {shards}: set it to 1"),
            (
                arch.local is not None and row_tokens > arch.local.chunk,
                f"a model whose layers see chunks of {arch.local and arch.local.chunk} "
                f"tokens with batch.row_tokens = {row_tokens}: lower it to the chunk",
            ),
        ],
    }
    return next((reason for refused, reason in limits[name] if refused), None)


def choose_attention(
    name: str,
    *,
    arch: Architecture,
    mesh: Mesh,
    dtype: DTypeLike,
    row_tokens: int,
    row_segments: int,
    block: int,
) -> SegmentAttention:
    """Return the attention model.attention, for the machine of `mesh`.

    "auto" is the machine's kernel if it supports these shapes, else blockwise.

    Args:
        name: the setting.
        arch: the decoder, for its heads.
        mesh: the learner's mesh.
        dtype: dtype of queries, keys and values.
        row_tokens: tokens of a row.
        row_segments: segments of a row, at most.
        block: tokens in a block of blockwise attention.

    Raises:
        ValueError: the name is unknown, or the kernel does not support these shapes.
    """
    made: dict[str, Callable[[], SegmentAttention]] = {
        "blockwise": lambda: BlockwiseAttention(mesh, block=block),
        "splash": lambda: SplashAttention(mesh, arch.num_heads),
        "cudnn": lambda: CudnnAttention(mesh, row_segments),
    }
    if name not in (*made, "auto"):
        raise ValueError(
            f"model.attention = {name!r}; choose from {sorted((*made, 'auto'))}"
        )
    platform = mesh.devices.flat[0].platform
    found = _OF_PLATFORM.get(platform, "blockwise") if name == "auto" else name
    refused = why_not(found, arch=arch, mesh=mesh, dtype=dtype, row_tokens=row_tokens)
    if refused and name != "auto":
        raise ValueError(
            f"model.attention = {name!r} does not support {refused}; or set "
            f"model.attention = 'auto'"
        )
    return made["blockwise" if refused else found]()
