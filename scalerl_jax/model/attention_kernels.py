"""Segment attention by kernels from JAX, and the choice among them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask_info as masks,
)
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.attention import (
    KEYS,
    QUERIES,
    SAVED,
    SPLASH_BLOCK,
    BlockwiseAttention,
    SegmentAttention,
    segment_starts,
)
from scalerl_jax.model.splash_gradient import (
    LANES,
    following_blocks,
    held_bytes,
    splash_gradient,
)
from scalerl_jax.parallel.mesh import ROWS, largest_divisor, over_mesh


@dataclasses.dataclass(frozen=True)
class SplashAttention:
    """JAX's splash attention, a Mosaic kernel for TPUs, causal with segments.

    The kernel skips the blocks that a mask leaves empty, and JAX makes its masks from
    static arrays.  Here each row has its own, made from its segment ids: the blocks
    between the start of a query's segment and the diagonal.  The backward pass is
    `splash_gradient`.
    """

    mesh: Mesh
    block: int = SPLASH_BLOCK  # queries, and keys, in one block, at most
    held: int | None = None  # see `splash_gradient`; None: by the kind of device
    interpret: bool = False  # on any device, slowly: for tests

    def __call__(
        self,
        q: Float[Array, "R S heads dim"],
        k: Float[Array, "R S kv dim"],
        v: Float[Array, "R S kv dim"],
        segment_ids: Int[Array, "R S"],
    ) -> Float[Array, "R S heads dim"]:
        """Return causal attention within each segment; anything finite on padding."""

        held = self.held or held_bytes(self.mesh.devices.flat[0].device_kind)

        def local(
            q: Array, k: Array, v: Array, of_queries: Array, of_keys: Array
        ) -> Array:
            queries = q.shape[1]
            # The largest multiple of a vector's lanes that divides a shard.
            vectors = largest_divisor(queries // LANES, self.block // LANES)
            first = jax.lax.axis_index("context") * queries
            places = first + jnp.arange(queries)

            def one_row(q: Array, k: Array, v: Array, *ids: Array) -> Array:
                needed = needed_blocks(places, ids[1], size=vectors * LANES)
                return _attend(self.interpret, held, (q, k, v), ids, places, needed)

            q, k, v = (x.swapaxes(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
            found = jax.vmap(one_row)(q, k, v, of_queries, of_keys)
            return found.swapaxes(1, 2)

        segments = (PartitionSpec(ROWS, "context"), PartitionSpec(ROWS, None))
        specs = (QUERIES, KEYS, KEYS, *segments)
        run = over_mesh(self.mesh, local, in_specs=specs, out_specs=QUERIES)
        return run(q, k, v, segment_ids, segment_ids)


def needed_blocks(
    places: Int[Array, " queries"], segment_ids: Int[Array, " S"], *, size: int
) -> Bool[Array, "Q K"]:
    """Return the blocks of queries and keys that hold a query and a key that it sees.

    Of padding only blocks on the diagonal are needed, so that no sum is empty.

    Args:
        places: positions of consecutive queries, from a multiple of `size` on.
        segment_ids: those of the whole row; 0 is padding.
        size: queries, and keys, of a block.
    """
    starts = segment_starts(segment_ids[None])[0]
    first = places[::size]  # its segment is a block's oldest
    oldest = jnp.where(segment_ids[first] > 0, starts[first], first) // size
    blocks = jnp.arange(len(starts) // size)
    return (oldest[:, None] <= blocks) & (blocks <= (first // size)[:, None])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    interpret: bool,
    held: int,
    inputs: tuple[Array, Array, Array],
    segments: tuple[Int[Array, " Q"], Int[Array, " S"]],
    places: Int[Array, " Q"],
    needed: Bool[Array, "q k"],
) -> Float[Array, "heads Q dim"]:
    """Return the attention of a row's scaled queries, computed in its needed blocks."""
    return _attend_forward(interpret, held, inputs, segments, places, needed)[0]


def _attend_forward(
    interpret: bool,
    held: int,
    inputs: tuple[Array, Array, Array],
    segments: tuple[Array, Array],
    places: Array,
    needed: Array,
) -> tuple[Array, tuple[Any, ...]]:
    del held
    block = len(places) // len(needed)
    kernel = splash.SplashAttentionKernel(
        _mask(needed, places),
        None,
        None,
        block_sizes=splash.BlockSizes(block, block, block),
        is_mqa=False,
        save_residuals=True,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=_not_later,
        interpret=interpret,
    )
    result: Any = kernel(*inputs, splash.SegmentIds(*segments))
    # Not by the kernel: remat policies do not see names inside its custom rule.
    found, (log_sums,) = checkpoint_name(result, SAVED)
    return found, (inputs, found, log_sums, segments, places, needed)


def _attend_backward(
    interpret: bool, held: int, saved: tuple[Any, ...], cotangent: Array
) -> tuple[Any, ...]:
    inputs, found, log_sums, *of_row = saved
    gradients = splash_gradient(
        inputs, found, log_sums, cotangent, *of_row, held=held, interpret=interpret
    )
    return gradients, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _mask(needed: Bool[Array, "q k"], places: Int[Array, " Q"]) -> masks.MaskInfo:
    """Return the needed blocks as JAX's kernel takes them.

    Its grid goes over blocks of queries for each head, and over the keys of each.  At a
    block that is not needed it fetches the next one that is.
    """
    return masks.MaskInfo(
        data_next=following_blocks(needed)[None],
        mask_next=None,
        block_mask=needed.astype(jnp.int8)[None],
        partial_mask_blocks=None,
        q_sequence=places,  # type: ignore[arg-type]
    )


def _not_later(queries: Array, keys: Array) -> Array:
    return queries >= keys


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
_PACKED = 9.0  # the compute capability from which on cuDNN takes packed rows: Hopper


def _is_packed(capability: str) -> bool:
    """Return whether cuDNN takes packed rows on a GPU; AMD's is a name: gfx942."""
    if capability.startswith("gfx"):
        return False
    return not capability or float(capability) >= _PACKED


def _why_narrow(arch: Architecture, row_tokens: int) -> list[tuple[bool, str]]:
    """Return whether a model has each of what only blockwise attention supports."""
    windows = arch.windows_within(row_tokens)
    return [
        (arch.sinks, "a model whose heads have sinks"),
        (arch.attention_cap > 0, "a model whose attention scores have a soft cap"),
        (
            bool(windows),
            f"a model whose layers see windows of {max(windows, default=0)} tokens "
            f"with batch.row_tokens = {row_tokens}",
        ),
    ]


def kernel_of(platform: str) -> str:
    """Return the attention that "auto" tries on a platform."""
    return _OF_PLATFORM.get(platform, "blockwise")


def why_not(
    name: str,
    *,
    arch: Architecture,
    platform: str,
    shards: int,
    dtype: DTypeLike,
    row_tokens: int,
    capability: str = "",
) -> str | None:
    """Return the setting that an attention refuses, and the way out; None: it fits.

    Arguments are those of `choose_attention`; `name` is not "auto", `shards` are
    mesh.context, and `capability` is a GPU's compute capability, empty if unknown.
    """
    dim, kind = arch.head_dim, jnp.dtype(dtype)
    narrow = _why_narrow(arch, row_tokens)
    limits: dict[str, list[tuple[bool, str]]] = {
        "blockwise": [],
        "splash": [
            *narrow,
            (platform != "tpu", f"{platform} devices: it needs TPUs"),
            (
                bool(dim % LANES),
                f"a model of head_dim = {dim}: it must be a multiple of {LANES}",
            ),
            (
                bool(row_tokens % (LANES * shards)),
                f"batch.row_tokens = {row_tokens} over mesh.context = {shards}: a "
                f"shard must be a multiple of {LANES} tokens; change batch.row_tokens",
            ),
        ],
        "cudnn": [
            *narrow,
            (platform != "gpu", f"{platform} devices: it needs GPUs"),
            (
                not _is_packed(capability),
                f"GPUs of compute capability {capability}: packed rows need {_PACKED}",
            ),
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
        "splash": lambda: SplashAttention(mesh),
        "cudnn": lambda: CudnnAttention(mesh, row_segments),
    }
    if name not in (*made, "auto"):
        raise ValueError(
            f"model.attention = {name!r}; choose from {sorted((*made, 'auto'))}"
        )
    device = mesh.devices.flat[0]
    found = kernel_of(device.platform) if name == "auto" else name
    refused = why_not(
        found,
        arch=arch,
        platform=device.platform,
        shards=mesh.shape["context"],
        dtype=dtype,
        row_tokens=row_tokens,
        capability=getattr(device, "compute_capability", ""),
    )
    if refused and name != "auto":
        raise ValueError(
            f"model.attention = {name!r} does not support {refused}; or set "
            f"model.attention = 'auto'"
        )
    return made["blockwise" if refused else found]()
