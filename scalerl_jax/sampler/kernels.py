"""The attention backend with JAX's kernel for TPUs, and the choice of a backend."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    ragged_paged_attention,
)
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from scalerl_jax.sampler.attention import (
    CachedAttention,
    Chunk,
    GatheredAttention,
    Near,
    Places,
)
from scalerl_jax.sampler.decoding import EngineSettings
from scalerl_jax.sampler.kernels_gpu import (
    CAPPED,
    WITH_SINKS,
    TritonPagedAttention,
    make_cudnn,
    why_not_cudnn,
    why_not_triton,
)
from scalerl_jax.sampler.kernels_int8 import LANES, QuantizedPallasAttention
from scalerl_jax.sampler.paged import PagedAttention, RowPagedAttention
from scalerl_jax.sampler.stored import Stored, is_quantized

# Block sizes are set here: the kernel's own table needs a TPU in the process, and fails
# if a program is compiled without one.  The kernel computes a block's queries against
# each sequence that the block overlaps, hence few queries for decoding.
_BLOCK_TOKENS = 512  # keys that are read together
_DECODE_QUERIES = 8
_CHUNK_QUERIES = 32
# The page table is in scalar memory, 1 MiB on v5e, v5p and v6e, with rows padded to
# whole lines; the kernel itself needs about 3 KiB.
_TABLE_BYTES = 1_000_000
_TABLE_LINE = 128


@struct.dataclass(kw_only=True)
class CombinedPages:
    """A layer's cache in the TPU kernel's layout: a head's value after its key."""

    heads: Float[Array, "pages size keys_and_values dim"]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.heads.shape[1]

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of keys and values."""
        return self.heads.dtype

    def put(self, new: Stored, places: Places) -> "CombinedPages":
        """Return the pages with T new keys and values written at `places`."""
        heads = jnp.stack((new.keys, new.values), axis=2)
        heads = heads.reshape(-1, *self.heads.shape[2:])
        return CombinedPages(
            heads=self.heads.at[places.page, places.offset].set(heads, mode="drop")
        )

    def read(self, numbers: Int[Array, "..."]) -> Stored:
        """Return what pages hold, with the axes of `Pages.read`."""
        found = self.heads[numbers]
        found = found.reshape(*found.shape[:-2], -1, 2, found.shape[-1])
        keys, values = found[..., 0, :], found[..., 1, :]
        return Stored(
            keys=jnp.moveaxis(keys, -3, -1), values=jnp.swapaxes(values, -3, -2)
        )


_HEADS = PartitionSpec(None, None, "tensor")  # of the pages' keys and values
_SINKS = "choose_attention chooses no kernel for a model whose heads have sinks"


class PallasAttention(PagedAttention):
    """JAX's ragged paged attention, a Mosaic kernel for TPUs.

    The kernel reads all pages in its table.  If a layer sees a part (`near`), a decoded
    token's table has only the pages of that part.  Prefill chunks have all pages; the
    kernel masks tokens before a sliding window.  In layers that see chunks of the
    sequence, prompt tokens may be on both sides of a border, and use plain XLA.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Shard the heads over the "tensor" axis of `mesh`."""
        super().__init__()
        self._mesh = mesh

    def page_specs(self, pages: CombinedPages) -> CombinedPages:
        """Return the partition specs of a layer's pages."""
        return jax.tree.map(lambda _: _HEADS, pages)

    def init_pages(
        self, num_pages: int, page_size: int, *, heads: int, dim: int, dtype: DTypeLike
    ) -> CombinedPages:
        """Return a layer's empty pages."""
        return CombinedPages(
            heads=jnp.zeros((num_pages, page_size, 2 * heads, dim), dtype)
        )

    def attend_rows(
        self,
        q: Array,
        pages: CombinedPages,
        table: Array,
        lengths: Array,
        near: Near | None = None,
        sinks: Array | None = None,
    ) -> Float[Array, "rows heads dim"]:
        """Return each row's attention of its last token to its `lengths` tokens."""
        assert sinks is None, _SINKS
        count = q.shape[0]
        if near is not None:
            first = near.first(lengths - 1)
            if near.ring:
                table, first = near.pages_from(table, first, size=pages.page_size)
            else:
                if near.sliding:
                    first = first // pages.page_size * pages.page_size
                places = first[:, None] // pages.page_size + jnp.arange(table.shape[1])
                table = jnp.take_along_axis(table, places, axis=1, mode="clip")
            lengths = lengths - first
        # Each copy of the cache (over a mixture's "expert" axis) takes some rows.
        copies = self._mesh.shape["expert"]
        own = count if count % copies else count // copies
        return self._attend(
            q,
            pages,
            table,
            lengths,
            starts=jnp.arange(own + 1, dtype=jnp.int32),
            num_sequences=jnp.full(1, own, jnp.int32),
            queries_per_block=_DECODE_QUERIES,
            rows="expert" if own < count else None,
            window=near.tokens if near is not None and near.sliding else None,
        )

    def attend_chunk(
        self,
        q: Array,
        new: Stored,
        pages: CombinedPages,
        chunk: Chunk,
        near: Near | None = None,
        sinks: Array | None = None,
    ) -> Float[Array, "C heads dim"]:
        """Return the attention of a chunk to its sequences' pages; 0 for padding."""
        assert sinks is None, _SINKS
        if near is not None and not near.sliding:
            return super().attend_chunk(q, new, pages, chunk, near)
        del new
        table, lengths = chunk.table, chunk.lengths
        if near is not None and near.ring:
            own = jnp.diff(chunk.query_starts)
            oldest = near.first(jnp.maximum(lengths - own, 0))
            table, base = near.pages_from(table, oldest, size=pages.page_size)
            lengths = lengths - base
        # The kernel fetches the first sequence's pages, but waits for them only if it
        # has a query: so an empty chunk gets a query of one token.
        found = self._attend(
            q,
            pages,
            table,
            jnp.maximum(lengths, 1),
            starts=chunk.query_starts.at[1:].max(1),
            num_sequences=jnp.maximum(chunk.num_sequences, 1),
            queries_per_block=_CHUNK_QUERIES,
            window=None if near is None else near.tokens,
        )
        # After the last sequence the kernel's output is uninitialised memory.
        return jnp.where((chunk.segments > 0)[:, None, None], found, 0)

    def _attend(
        self,
        q: Array,
        pages: CombinedPages,
        table: Int[Array, "S pages"],
        lengths: Int[Array, " S"],
        *,
        starts: Int[Array, " bounds"],
        num_sequences: Int[Array, " 1"],
        queries_per_block: int,
        rows: str | None = None,
        window: int | None = None,
    ) -> Array:
        """Return the kernel's result; `rows` is the mesh axis that shards sequences."""
        parts = self._mesh.shape[rows] if rows else 1
        blocks = dict(
            num_kv_pages_per_block=min(
                max(1, _BLOCK_TOKENS // pages.page_size), table.shape[1]
            ),
            num_queries_per_block=min(queries_per_block, q.shape[0] // parts),
        )

        def attend(*arrays: Array) -> Array:
            return ragged_paged_attention(
                *arrays,
                sm_scale=q.shape[-1] ** -0.5,
                sliding_window=window,
                **blocks,
            )

        # Also on one device: the kernel's compiler takes the TPU's type from the mesh.
        heads, whole = PartitionSpec(rows, "tensor"), PartitionSpec()
        shared = PartitionSpec(rows)
        cut = jax.shard_map(
            attend,
            mesh=self._mesh,
            in_specs=(heads, _HEADS, shared, shared, whole, whole),
            out_specs=heads,
            check_vma=False,
        )
        return cut(q, pages.heads, lengths, table, starts, num_sequences)


def choose_attention(settings: EngineSettings, mesh: Mesh) -> CachedAttention:
    """Return the backend `settings.attention`, for the machine of `mesh`.

    Raises:
        ValueError: the backend is unknown, or does not support these shapes.
    """
    name = settings.attention
    if name not in ATTENTION:
        raise ValueError(
            f"sampler.attention = {name!r}; choose from {sorted(ATTENTION)}"
        )
    return ATTENTION[name](settings, mesh)


def _for_machine(settings: EngineSettings, mesh: Mesh) -> CachedAttention:
    platform = mesh.devices.flat[0].platform
    if platform == "tpu":
        # Plain XLA would take such pages, but copies the cache to write into them.
        if broken := _why_not_int8_pages(settings):
            raise ValueError(f"TPUs have no attention for {broken}")
        refused = why_not_pallas(settings, tensor=mesh.shape["tensor"])
        return _paged(settings, mesh) if refused else _of_dtype(settings, mesh)
    if platform != "gpu":
        return _gathered(settings, mesh)
    if not why_not_triton(settings, tensor=mesh.shape["tensor"]):
        return _triton(settings, mesh)
    # Rows of a large model do not fit when they are copied; it is not in float32.
    copied = jnp.dtype(settings.dtype) == jnp.float32 and not why_not_cudnn(settings)
    return make_cudnn(settings, mesh) if copied else _paged(settings, mesh)


def _paged(settings: EngineSettings, mesh: Mesh) -> CachedAttention:
    tpu = mesh.devices.flat[0].platform == "tpu"
    backend = RowPagedAttention if tpu else PagedAttention
    return backend(cap=settings.arch.attention_cap)


def _gathered(settings: EngineSettings, mesh: Mesh) -> CachedAttention:
    del mesh
    return GatheredAttention(cap=settings.arch.attention_cap)


def _pallas(settings: EngineSettings, mesh: Mesh) -> CachedAttention:
    platform = mesh.devices.flat[0].platform
    if platform not in _KERNELS:
        raise ValueError(
            f"sampler.attention = 'pallas' needs TPUs or GPUs, and the sampler has "
            f"{platform} devices: set sampler.attention = 'auto'"
        )
    why_not, kernel = _KERNELS[platform]
    if refused := why_not(settings, tensor=mesh.shape["tensor"]):
        raise ValueError(
            f"sampler.attention = 'pallas' does not support {refused}; "
            f"or set sampler.attention = 'auto'"
        )
    return kernel(settings, mesh)


def _of_dtype(settings: EngineSettings, mesh: Mesh) -> CachedAttention:
    """Return the TPU kernel for the cache's dtype."""
    if is_quantized(settings.cache_dtype):
        return QuantizedPallasAttention(mesh)
    return PallasAttention(mesh)


def _triton(settings: EngineSettings, mesh: Mesh) -> CachedAttention:
    return TritonPagedAttention(mesh, cap=settings.arch.attention_cap)


def why_not_pallas(settings: EngineSettings, *, tensor: int) -> str | None:
    """Return the setting that the TPU kernel refuses, and the way out; None: it fits.

    The limits were found by compiling the kernel for v5e, v5p and v6e.
    """
    arch, dtype = settings.arch, jnp.dtype(settings.dtype)
    table_bytes = _table_bytes(settings)
    chunk = arch.local.chunk if arch.local is not None and settings.near else 0
    if arch.attention_cap or arch.sinks:
        return CAPPED if arch.attention_cap else WITH_SINKS
    if chunk % settings.page_size:
        return (
            f"a model whose layers see chunks of {chunk} tokens: set "
            f"sampler.page_size = {settings.page_size} to a divisor of them"
        )
    if settings.page_size > _BLOCK_TOKENS:
        return (
            f"sampler.page_size = {settings.page_size}: "
            f"set it to {_BLOCK_TOKENS} or less"
        )
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"model.sampler_dtype = {dtype}: set it to 'bfloat16' or 'float32'"
    if arch.head_dim != 128:
        return f"a model of head_dim = {arch.head_dim}: it must be 128"
    if arch.num_kv_heads % tensor:
        return (
            f"mesh.tensor = {tensor} with {arch.num_kv_heads} kv heads: "
            f"set it to a divisor of them"
        )
    if refused := _why_not_heads(settings, tensor=tensor):
        return refused
    if table_bytes > _TABLE_BYTES:
        return (
            f"a page table of {table_bytes} bytes, {_TABLE_BYTES} is the limit: "
            f"raise sampler.page_size = {settings.page_size} or lower "
            f"sampler.slots = {settings.slots}"
        )
    return None


def _why_not_heads(settings: EngineSettings, *, tensor: int) -> str | None:
    """Return why the kernel of the cache's dtype refuses a device's heads."""
    arch, dtype = settings.arch, jnp.dtype(settings.dtype)
    kv_heads, group = arch.num_kv_heads // tensor, arch.num_heads // arch.num_kv_heads
    whole = 8 if dtype == jnp.bfloat16 else 4
    if is_quantized(settings.cache_dtype):
        return _why_not_int8_pages(settings)
    if kv_heads not in (1, 2, 4) and kv_heads % whole:
        return (
            f"{arch.num_kv_heads} kv heads over mesh.tensor = {tensor}: {kv_heads} "
            f"on a device must be 1, 2, 4 or a multiple of {whole} in {dtype}; "
            f"change mesh.tensor"
        )
    if dtype == jnp.float32 and kv_heads > 4 and group == 1:
        return (
            f"{kv_heads} kv heads on a device, with one query head each, in float32: "
            f"raise mesh.tensor = {tensor} until 4 are left, or set "
            f"model.sampler_dtype = 'bfloat16'"
        )
    return None


def _why_not_int8_pages(settings: EngineSettings) -> str | None:
    if not is_quantized(settings.cache_dtype) or settings.page_size % LANES == 0:
        return None
    return (
        f"sampler.kv_dtype = {settings.kv_dtype!r} with sampler.page_size = "
        f"{settings.page_size}: set it to {LANES} or a multiple"
    )


def _table_bytes(settings: EngineSettings) -> int:
    """Return the bytes of scalar memory for the pages and lengths of all slots."""
    return settings.slots * _slot_bytes(settings.pages_per_slot)


def most_slots(pages_per_slot: int) -> int:
    """Return the largest number of slots of `pages_per_slot` for the TPU kernel."""
    return _TABLE_BYTES // _slot_bytes(pages_per_slot)


def _slot_bytes(pages_per_slot: int) -> int:
    line = -(-pages_per_slot // _TABLE_LINE) * _TABLE_LINE
    return 4 * (line + 2)


# By the platform: what the kernel of "pallas" refuses, and the kernel.
_KERNELS = {"tpu": (why_not_pallas, _of_dtype), "gpu": (why_not_triton, _triton)}
# By the value of sampler.attention.
ATTENTION: dict[str, Callable[[EngineSettings, Mesh], CachedAttention]] = {
    "auto": _for_machine,
    "paged": _paged,
    "gathered": _gathered,
    "pallas": _pallas,
    "cudnn": make_cudnn,
}
