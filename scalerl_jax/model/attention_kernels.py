"""Segment attention by kernels that JAX ships, and which one a machine gets."""

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
    ROWS,
    SAVED,
    BlockwiseAttention,
    SegmentAttention,
)

_LANES = 128  # of a TPU's vector; what the kernel's blocks are multiples of
_MOST_BLOCK = 512
# Segments of a row that cuDNN is told of; `rollout.batching` puts no more in one.
MAX_SEGMENTS = 128


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
        """Causal attention within each segment."""
        length, shards = q.shape[1], self.mesh.shape["context"]
        block = _block_of(length // shards)
        sizes = splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=block,
            block_kv_dq=block,
        )
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([masks.CausalMask((length, length))] * self.heads),
            block_sizes=sizes,
            head_shards=self.mesh.shape["tensor"],
            q_seq_shards=shards,
            residual_checkpoint_name=SAVED,
            interpret=self.interpret,
        )
        over = NamedSharding(self.mesh, PartitionSpec("tensor", "context"))

        @functools.partial(
            jax.shard_map,
            mesh=self.mesh,
            in_specs=(
                kernel.manual_sharding_spec(over),
                QUERIES,
                KEYS,
                KEYS,
                PartitionSpec(ROWS, "context"),
                PartitionSpec(ROWS, None),
            ),
            out_specs=QUERIES,
            check_vma=False,
        )
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

        return local(kernel, q, k, v, segment_ids, segment_ids)


def _block_of(length: int) -> int:
    """The largest multiple of `_LANES` that divides `length`, to a limit."""
    return max(
        (n for n in range(_LANES, _MOST_BLOCK + 1, _LANES) if length % n == 0),
        default=0,
    )


@dataclasses.dataclass(frozen=True)
class CudnnAttention:
    """cuDNN's flash attention, through JAX, told where each segment begins."""

    mesh: Mesh

    def __call__(
        self,
        q: Float[Array, "R S heads dim"],
        k: Float[Array, "R S kv dim"],
        v: Float[Array, "R S kv dim"],
        segment_ids: Int[Array, "R S"],
    ) -> Float[Array, "R S heads dim"]:
        """Causal attention within each segment; 0 on padding."""

        @functools.partial(
            jax.shard_map,
            mesh=self.mesh,
            in_specs=(QUERIES, KEYS, KEYS, PartitionSpec(ROWS, None)),
            out_specs=QUERIES,
            check_vma=False,
        )
        def local(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
            lengths, offsets = segment_places(segment_ids)
            # The public jax.nn.dot_product_attention takes no segments.
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
            # Past the last segment cuDNN writes nothing.
            return jnp.where((segment_ids > 0)[..., None, None], found, 0)

        return local(q, k, v, segment_ids)


def segment_places(
    segment_ids: Int[Array, "R S"],
) -> tuple[Int[Array, "R segments"], Int[Array, "R segments+1"]]:
    """Length and first position of every segment of a row; -1 where there is none.

    A row's segments 1, 2, ... are laid end to end from its first position.
    """
    numbers = jnp.arange(1, MAX_SEGMENTS + 1)
    lengths = (segment_ids[:, None, :] == numbers[:, None]).sum(axis=-1)
    ends = jnp.cumsum(lengths, axis=1)
    starts = jnp.pad(ends, ((0, 0), (1, 0)))
    exists = jnp.pad(lengths > 0, ((0, 0), (1, 0)), constant_values=True)
    lengths = jnp.where(lengths > 0, lengths, -1)
    return lengths.astype(jnp.int32), jnp.where(exists, starts, -1).astype(jnp.int32)


def choose_attention(
    name: str,
    *,
    arch: Architecture,
    mesh: Mesh,
    dtype: DTypeLike,
    row_tokens: int,
    block: int,
) -> SegmentAttention:
    """The attention that model.attention names, for the machine of `mesh`.

    Raises:
        ValueError: there is none of that name, or it does not take these shapes.
    """
    if name not in (*ATTENTION, "auto"):
        raise ValueError(
            f"model.attention = {name!r}; choose from {sorted((*ATTENTION, 'auto'))}"
        )
    platform = mesh.devices.flat[0].platform
    plain = BlockwiseAttention(mesh, block=block)
    if name == "auto":
        name = {"tpu": "splash", "gpu": "cudnn"}.get(platform, "blockwise")
        refused = WHY_NOT[name](arch, mesh, dtype, row_tokens)
        return plain if refused else ATTENTION[name](arch, mesh, plain)
    refused = WHY_NOT[name](arch, mesh, dtype, row_tokens)
    if refused:
        raise ValueError(
            f"model.attention = {name!r} does not take {refused}; or set "
            f"model.attention = 'auto'"
        )
    return ATTENTION[name](arch, mesh, plain)


def _why_not_splash(
    arch: Architecture, mesh: Mesh, dtype: DTypeLike, row_tokens: int
) -> str | None:
    """The setting that the TPU kernel does not take, its limit, and the way out."""
    del dtype
    platform, shards = mesh.devices.flat[0].platform, mesh.shape["context"]
    if platform != "tpu":
        return f"{platform} devices: it needs TPUs"
    if arch.head_dim % _LANES:
        return f"a model of head_dim = {arch.head_dim}: it must be a multiple of 128"
    if row_tokens % (_LANES * shards):
        return (
            f"batch.row_tokens = {row_tokens} over mesh.context = {shards}: a shard "
            f"must be a multiple of {_LANES} tokens; change batch.row_tokens"
        )
    return None


def _why_not_cudnn(
    arch: Architecture, mesh: Mesh, dtype: DTypeLike, row_tokens: int
) -> str | None:
    """The setting that cuDNN does not take, its limit, and the way out."""
    del row_tokens
    platform, shards = mesh.devices.flat[0].platform, mesh.shape["context"]
    if platform != "gpu":
        return f"{platform} devices: it needs GPUs"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"model.compute_dtype = {jnp.dtype(dtype)}: set it to 'bfloat16'"
    if arch.head_dim % 8 or arch.head_dim > 128:
        return f"a model of head_dim = {arch.head_dim}: a multiple of 8 up to 128"
    if shards > 1:
        return f"mesh.context = {shards}: set it to 1"
    return None


Refusal = Callable[[Architecture, Mesh, DTypeLike, int], str | None]
Maker = Callable[[Architecture, Mesh, BlockwiseAttention], SegmentAttention]

# By the value of model.attention.
WHY_NOT: dict[str, Refusal] = {
    "blockwise": lambda arch, mesh, dtype, row_tokens: None,
    "splash": _why_not_splash,
    "cudnn": _why_not_cudnn,
}
ATTENTION: dict[str, Maker] = {
    "blockwise": lambda arch, mesh, plain: plain,
    "splash": lambda arch, mesh, plain: SplashAttention(mesh, arch.num_heads),
    "cudnn": lambda arch, mesh, plain: CudnnAttention(mesh),
}
