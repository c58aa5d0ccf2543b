"""Attention backends for GPUs: JAX's paged attention kernel, and cuDNN on copied rows.

Pallas lowers the kernel by Triton, for compute capability 8.0 and above.  Since JAX
0.11 that way is deprecated, since 0.12 the kernel's module too, which is therefore
imported where it is used.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from scalerl_jax.sampler.attention import (
    CachedAttention,
    Near,
    Pages,
    Places,
    Rows,
    places_of,
)
from scalerl_jax.sampler.decoding import EngineSettings
from scalerl_jax.sampler.paged import PagedAttention
from scalerl_jax.sampler.stored import Stored, is_quantized, stored

_BLOCK_NUMBERS = 8192  # of a block of keys, which is in shared memory: 16 KiB
_LARGEST_PAGE = 16384  # such numbers; with its values 74 KB, where a GPU has 99 or more
_SPLIT_TOKENS = 512  # of a table, at least, that one program of the kernel reads
_MOST_SPLITS = 16
_QUERIES = 16  # the rows of a tensor core's product: a group is padded to them
_WARPS = 4  # of a program

CAPPED = "a model whose attention scores have a soft cap"
WITH_SINKS = "a model whose heads have sinks"


@struct.dataclass(kw_only=True)
class HeadPages(Pages):
    """A layer's cache in the GPU kernel's layout: a key is a row, as a value is.

    So `keys` are [pages, kv, size, dim], as `values`.
    """

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.keys.shape[2]

    def put(self, new: Stored, places: Places) -> "HeadPages":
        """Return the pages with T new keys and values written at `places`."""

        def write(held: Array, token: Array) -> Array:
            at = held.at[places.page, :, places.offset]
            return at.set(token, mode="drop")

        return jax.tree.map(write, self, HeadPages(**vars(new)))

    def read(self, numbers: Int[Array, "..."]) -> Stored:
        """Return what pages hold, with the axes of `Pages.read`."""
        found: Any = super().read(numbers)
        return found.replace(keys=jnp.swapaxes(found.keys, -2, -1))


class TritonPagedAttention(PagedAttention):
    """JAX's paged attention kernel for GPUs; prompt chunks use plain XLA.

    Scores, softmax and sums are float32.  Weights are rounded to bfloat16, beside int8
    to TensorFloat-32, and a row's unscaled results to bfloat16: errors are twice those
    of rounding the result alone.  A program of the kernel takes a head of keys, its
    queries, and a part of the row's pages.
    """

    def __init__(
        self, mesh: Mesh, *, cap: float = 0.0, interpret: bool = False
    ) -> None:
        """Shard the heads over the "tensor" axis of `mesh`.

        Args:
            mesh: the devices.
            cap: the soft cap of the scores; 0: none.
            interpret: run the kernel as XLA operations, on any machine.
        """
        super().__init__(cap=cap)
        self._mesh, self._interpret = mesh, interpret

    def init_pages(
        self, num_pages: int, page_size: int, *, heads: int, dim: int, dtype: DTypeLike
    ) -> HeadPages:
        """Return a layer's empty pages; in int8 they have scales."""
        plain = super().init_pages(
            num_pages, page_size, heads=heads, dim=dim, dtype=dtype
        )
        return HeadPages(**vars(plain) | {"keys": plain.values})

    def attend_rows(
        self,
        q: Array,
        pages: HeadPages,
        table: Array,
        lengths: Array,
        near: Near | None = None,
        sinks: Array | None = None,
    ) -> Float[Array, "rows heads dim"]:
        """Return each row's attention of its last token to its `lengths` tokens."""
        assert near is None and sinks is None, "see why_not_triton"
        # Each copy of the cache (over a mixture's "expert" axis) takes some rows.
        rows = None if len(q) % self._mesh.shape["expert"] else "expert"
        heads, own = PartitionSpec(rows, "tensor"), PartitionSpec(rows)
        cut = jax.shard_map(
            self._attend,
            mesh=self._mesh,
            in_specs=(heads, self.page_specs(pages), own, own),
            out_specs=heads,
            check_vma=False,
        )
        return cut(q, pages, table, lengths)

    def _attend(
        self,
        q: Float[Array, "rows heads dim"],
        pages: HeadPages,
        table: Int[Array, "rows pages"],
        lengths: Int[Array, " rows"],
    ) -> Float[Array, "rows heads dim"]:
        """Return the kernel's result on a device's own heads.

        The kernel wants the heads before the pages.  It gets every head's page as a
        page of one head instead, and every head of a row as a row.
        """
        # Deprecated since JAX 0.12, which warns.
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        (rows, heads, dim), kv, size = q.shape, pages.keys.shape[1], pages.page_size
        per_block = max(1, _BLOCK_NUMBERS // (dim * size))
        splits = min(-(-table.shape[1] * size // _SPLIT_TOKENS), _MOST_SPLITS)
        table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % (splits * per_block))))
        table = table[:, None] * kv + jnp.arange(kv)[:, None]

        def of_one_head(held: Array) -> Array:
            return held.reshape(1, -1, *held.shape[2:])

        # The scores' factor is float32, as the keys' scales: to round scaled queries
        # to bfloat16 would double the error of a sharp attention.
        factors = jnp.full(pages.keys.shape[:3], dim**-0.5, jnp.float32)
        if pages.key_scales is not None:
            factors *= pages.key_scales
        of_values = pages.value_scales
        found = paged_attention(
            q.reshape(rows * kv, heads // kv, dim),
            of_one_head(pages.keys),
            of_one_head(pages.values),
            table.reshape(rows * kv, -1),
            jnp.repeat(lengths, kv),
            of_one_head(factors),
            None if of_values is None else of_one_head(of_values),
            block_h=_QUERIES,
            pages_per_compute_block=per_block,
            k_splits=splits,
            num_warps=_WARPS,
            interpret=self._interpret,
            attn_logits_soft_cap=self._cap or None,
        )
        return found.reshape(q.shape)


@struct.dataclass(kw_only=True)
class _WholeRows:
    """A layer's rows: tokens cached before the call, then the new tokens."""

    keys: Float[Array, "rows tokens kv dim"]
    values: Float[Array, "rows tokens kv dim"]
    steps: int = struct.field(pytree_node=False)


class CudnnPagedAttention(CachedAttention):
    """Attention by `jax.nn.dot_product_attention`, over pages copied into rows."""

    width_steps = (1.0,)

    def __init__(self, implementation: Literal["cudnn", "xla"]) -> None:
        """Use cuDNN or, for shapes that it does not support, XLA."""
        super().__init__()
        self._implementation: Literal["cudnn", "xla"] = implementation

    def open(
        self,
        pages: tuple[Any, ...],
        rows: Rows,
        steps: int,
        nears: Sequence[Near | None],
    ) -> tuple[Any, ...]:
        """Return a copy of the rows' tokens."""
        del nears
        count, width = rows.table.shape

        def gather(layer: Pages) -> _WholeRows:
            _, heads, size, dim = layer.values.shape
            shape = (count, width * size, heads, dim)
            keys = layer.keys[rows.table].transpose(0, 1, 4, 2, 3).reshape(shape)
            values = layer.values[rows.table].transpose(0, 1, 3, 2, 4).reshape(shape)
            # After a row's own tokens come others': their NaN passes an added mask.
            own = (jnp.arange(shape[1]) < rows.starts[:, None])[..., None, None]
            return _WholeRows(keys=jnp.where(own, keys, 0), values=values, steps=steps)

        return tuple(gather(layer) for layer in pages)

    def decode(
        self,
        view: _WholeRows,
        q: Array,
        k: Array,
        v: Array,
        *,
        rows: Rows,
        step: Array,
        positions: Array,
        active: Array,
        near: Near | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, _WholeRows]:
        """Return attention over the rows up to `positions`, including the new token."""
        assert near is None and sinks is None, "see why_not_cudnn"
        del rows, step
        count, width = view.keys.shape[:2]
        at = (jnp.arange(count), jnp.where(active, positions, width))
        new = stored(k, v, view.keys.dtype)
        view = _WholeRows(
            keys=view.keys.at[at].set(new.keys, mode="drop"),
            values=view.values.at[at].set(new.values, mode="drop"),
            steps=view.steps,
        )
        mixed = jax.nn.dot_product_attention(
            q[:, None],
            view.keys,
            view.values,
            scale=q.shape[-1] ** -0.5,
            key_value_seq_lengths=jnp.where(active, positions + 1, 1),
            implementation=self._implementation,
        )
        return mixed[:, 0], view

    def close(
        self,
        pages: tuple[Any, ...],
        views: tuple[_WholeRows, ...],
        *,
        rows: Rows,
        positions: Array,
        nears: Sequence[Near | None],
    ) -> tuple[Any, ...]:
        """Return the pages with the call's tokens written."""
        del nears
        steps, count = views[0].steps, rows.starts.shape[0]
        at = rows.starts[:, None] + jnp.arange(steps)
        places = places_of(
            jnp.repeat(rows.table, steps, axis=0),
            at.ravel(),
            page_size=pages[0].page_size,
            valid=(at < positions[:, None]).ravel(),
        )
        new = (jnp.arange(count)[:, None], at)

        def write(layer: Pages, view: _WholeRows) -> Pages:
            shape = (count * steps, *view.keys.shape[2:])
            k, v = (each[new].reshape(shape) for each in (view.keys, view.values))
            return layer.put(stored(k, v, layer.dtype), places)

        return tuple(write(*pair) for pair in zip(pages, views, strict=True))


def make_cudnn(settings: EngineSettings, mesh: Mesh) -> CudnnPagedAttention:
    """Return attention by cuDNN or, for shapes that it does not support, XLA.

    Raises:
        ValueError: neither computes this model's attention.
    """
    if refused := why_not_cudnn(settings):
        raise ValueError(
            f"sampler.attention = 'cudnn' does not support {refused}; "
            f"set sampler.attention = 'auto'"
        )
    taken = (
        mesh.devices.flat[0].platform == "gpu"
        and jnp.dtype(settings.dtype) in (jnp.bfloat16, jnp.float16)
        # cuDNN supports up to 256, but only on the newest GPUs.
        and settings.arch.head_dim % 8 == 0
        and settings.arch.head_dim <= 128
    )
    return CudnnPagedAttention("cudnn" if taken else "xla")


def why_not_cudnn(settings: EngineSettings) -> str | None:
    """Return what cuDNN does not support; None: it fits."""
    if is_quantized(settings.cache_dtype):
        return f"sampler.kv_dtype = {settings.kv_dtype!r}"
    return CAPPED if settings.arch.attention_cap else _why_not_layers(settings)


def _why_not_layers(settings: EngineSettings) -> str | None:
    """Return what neither kernel for GPUs computes; None: they compute all layers."""
    if settings.arch.sinks:
        return WITH_SINKS
    if not settings.near:
        return None
    near = settings.near[0]
    parts = "windows" if near.sliding else "chunks"
    return (
        f"a model whose layers see {parts} of {near.tokens} tokens and sequences of "
        f"{settings.max_tokens}"
    )


def why_not_triton(settings: EngineSettings, *, tensor: int) -> str | None:
    """Return the setting that the kernel refuses, and the way out; None: it fits.

    The limits were found by compiling the kernel for an H100.
    """
    arch, dtype, size = settings.arch, jnp.dtype(settings.dtype), settings.page_size
    if refused := _why_not_layers(settings):
        return refused
    # Triton would round float32 to TensorFloat-32.  In float16 a long row's sums, which
    # the kernel hands over unscaled, are beyond 65,504.
    if dtype != jnp.bfloat16:
        return f"model.sampler_dtype = {dtype}: set it to 'bfloat16'"
    if not 16 <= arch.head_dim <= 512 or not _is_power_of_two(arch.head_dim):
        return (
            f"a model of head_dim = {arch.head_dim}: it must be a power of two from 16 "
            f"to 512"
        )
    if not _is_power_of_two(size) or size * arch.head_dim > _LARGEST_PAGE:
        return (
            f"sampler.page_size = {size}: set it to a power of two, "
            f"{_LARGEST_PAGE // arch.head_dim} or less"
        )
    if arch.num_kv_heads % tensor:
        return (
            f"mesh.tensor = {tensor} with {arch.num_kv_heads} kv heads: "
            f"set it to a divisor of them"
        )
    numbers = settings.num_pages * size * arch.num_kv_heads // tensor * arch.head_dim
    if is_quantized(settings.cache_dtype) and 2**31 < numbers <= 2**32:
        # Pallas counts bytes, and takes signed integers of 32 bits for these places.
        return (
            f"a cache of {settings.num_pages * size} tokens in int8, whose layer has "
            f"between 2**31 and 2**32 numbers: set sampler.cache_tokens to "
            f"{2**31 * tensor // (arch.num_kv_heads * arch.head_dim)} or less"
        )
    return None


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
