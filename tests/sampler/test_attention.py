"""Every backend against dense attention in float64, and what it leaves in the pages.

Pages start full of other data, and a NumPy copy of them follows what is written: what
a backend reads past a sequence's end, or writes beside its place, shows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import interpreted

from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.sampler import kernels_int8
from scalerl_jax.sampler.attention import (
    CachedAttention,
    Chunk,
    GatheredAttention,
    Near,
    Places,
    Rows,
)
from scalerl_jax.sampler.kernels import PallasAttention
from scalerl_jax.sampler.kernels_gpu import (
    CudnnPagedAttention,
    HeadPages,
    TritonPagedAttention,
)
from scalerl_jax.sampler.kernels_int8 import QuantizedPallasAttention
from scalerl_jax.sampler.paged import PagedAttention, RowPagedAttention
from scalerl_jax.sampler.stored import stored

DIM = 128  # the kernel for TPUs takes no other
STEPS = 4  # of a call
SINKS = np.array([-1.0, 0.5, 2.0, 0.0], np.float32)
CAP = 0.8  # scores reach 4
BACKENDS = {
    "paged": PagedAttention(),
    "rows": RowPagedAttention(),
    "gathered": GatheredAttention(),
    "cudnn": CudnnPagedAttention("xla"),
    "pallas": PallasAttention(make_mesh(jax.devices()[:1])),
    "triton": TritonPagedAttention(make_mesh(jax.devices()[:1]), interpret=True),
}
# Interpreted, the kernel for TPUs takes as long as all the others.
every_backend = pytest.mark.parametrize(
    "name",
    [
        *sorted(BACKENDS.keys() - {"pallas"}),
        pytest.param("pallas", marks=pytest.mark.slow),
    ],
)


@pytest.fixture(autouse=True)
def _interpreted():
    with interpreted():
        yield


@dataclasses.dataclass
class Cache:
    """A layer's pages, and a NumPy copy of what must be in them."""

    attention: CachedAttention
    kv: int = 2
    group: int = 2
    num_pages: int = 24
    size: int = 4
    dtype: str = "float32"
    seed: int = 0
    near: Near | None = None  # what is seen
    sinks: bool = False
    cap: float = 0.0  # of the scores, as the backend has it

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.pages = self.attention.init_pages(
            self.num_pages, self.size, heads=self.kv, dim=DIM, dtype=self.dtype
        )
        count = self.num_pages * self.size
        k, v = self.random(count, self.kv), self.random(count, self.kv)
        page, offset = np.divmod(np.arange(count), self.size)
        self.keys, self.values = (
            np.zeros((self.num_pages, self.size, self.kv, DIM)) for _ in range(2)
        )
        places = Places(page=jnp.asarray(page), offset=jnp.asarray(offset))
        self.pages = self.pages.put(stored(k, v, self.dtype), places)
        self.note(page, offset, k, v)
        self.unknown = np.zeros((self.num_pages, self.size), bool)

    def random(self, *shape):
        """Normal numbers in the dtype of the cache; of many sizes for int8."""
        if self.dtype == "int8":
            sizes = np.exp(self.rng.normal(size=(*shape, 1)))
            return jnp.asarray(sizes * self.rng.normal(size=(*shape, DIM)), jnp.float32)
        return jnp.asarray(self.rng.normal(size=(*shape, DIM)), self.dtype)

    @property
    def options(self):
        return self.near, self.sinks

    def note(self, page, offset, k, v):
        """What is written, into the copy."""
        k, v = (np.asarray(each) for each in (k, v))
        known = np.isfinite(k) & np.isfinite(v)
        k, v = np.where(known, k, np.nan), np.where(np.isfinite(v), v, 0)
        if self.dtype == "int8":
            k, v = rounded(k), rounded(v)
        self.keys[page, offset], self.values[page, offset] = k, v

    def place(self, table, positions):
        index = np.asarray(positions) // self.size
        if self.near and self.near.ring:
            index = index % self.near.ring
        return table[index], positions % self.size

    def expected(self, q, table, length):
        """Dense attention of one query [heads, dim], that of the last of `length`."""
        first = 0
        if self.near and self.near.sliding:
            first = max(0, length - self.near.tokens)
        elif self.near:
            first = (length - 1) // self.near.tokens * self.near.tokens
        places = self.place(table, np.arange(first, length))
        k, v = (held[places] for held in (self.keys, self.values))
        q = np.asarray(q, np.float64).reshape(self.kv, self.group, DIM)
        scores = np.einsum("kgd,skd->kgs", q, k) / np.sqrt(DIM)
        if self.cap:
            scores = self.cap * np.tanh(scores / self.cap)
        shares = np.exp(scores)
        total = shares.sum(axis=-1, keepdims=True)
        if self.sinks:
            total += np.exp(SINKS.astype(np.float64)).reshape(self.kv, self.group, 1)
        shares /= total
        return np.einsum("kgs,skd->kgd", shares, v).reshape(-1, DIM)

    def close_to(self, found, expected):
        """Equal but for rounding: of sums in float32, of shares and result in bf16."""
        bound = 2.0**-6 if self.dtype == "bfloat16" else 2e-5
        np.testing.assert_allclose(
            np.asarray(found, np.float64), expected, atol=bound, rtol=bound
        )

    def assert_pages(self):
        """Every page, bit for bit, but for places where either content will do."""
        arrays = jax.tree.map(np.asarray, self.pages)
        scales = [None, None]
        if hasattr(arrays, "heads"):
            keys, values = arrays.heads[:, :, 0::2], arrays.heads[:, :, 1::2]
            if self.dtype == "int8":
                tiles = arrays.heads.transpose(0, 1, 3, 2, 4)
                whole = tiles.reshape(self.num_pages, self.size, 2 * self.kv, DIM)
                keys, values = whole[:, :, 0::2], whole[:, :, 1::2]
                scales = [arrays.scales[:, 0::2], arrays.scales[:, 1::2]]
        elif hasattr(arrays, "rows"):
            keys, values = np.split(arrays.rows.transpose(0, 2, 1, 3), 2, axis=-1)
            scales = [arrays.key_scales, arrays.value_scales]
        else:
            of_rows = isinstance(arrays, HeadPages)
            keys = arrays.keys.transpose((0, 2, 1, 3) if of_rows else (0, 3, 1, 2))
            values = arrays.values.transpose(0, 2, 1, 3)
            scales = [arrays.key_scales, arrays.value_scales]
        known = ~self.unknown
        for held, of_tokens, wanted in zip(
            (keys, values), scales, (self.keys, self.values), strict=True
        ):
            assert held.dtype == self.dtype
            found = held.astype(np.float64)
            if self.dtype == "int8":
                assert of_tokens.dtype == np.float32
                found = found * of_tokens.transpose(0, 2, 1)[..., None]
            np.testing.assert_array_equal(found[known], wanted[known])
        assert np.isfinite(values.astype(np.float32)).all()

    def decode(self, table, starts, active, ends):
        """A call, checked; row r ends with step ends[r].  Positions after it."""
        rows = len(starts)
        q = self.random(STEPS, rows, self.kv * self.group)
        k, v = self.random(STEPS, rows, self.kv), self.random(STEPS, rows, self.kv)
        return self.decode_with(table, starts, active, ends, q, k, v)

    def decode_with(self, table, starts, active, ends, q, k, v, *, trust=None):
        rows = Rows(table=jnp.asarray(table), starts=jnp.asarray(starts))
        self.pages, found = _call(
            self.attention, self.options, self.pages, rows, active, ends, q, k, v
        )
        positions, active = starts.copy(), active.copy()
        for step in range(STEPS):
            for row in np.flatnonzero(active):
                page, offset = self.place(table[row], positions[row])
                self.note(page, offset, k[step, row], v[step, row])
                if trust is None or trust[row]:
                    self.close_to(
                        found[step, row],
                        self.expected(q[step, row], table[row], positions[row] + 1),
                    )
                # A sequence's last token needs no place in the cache.
                self.unknown[page, offset] = step == ends[row]
            active &= step < ends
            positions += active
        self.assert_pages()
        return positions, active


def rounded(x):
    """What int8 keeps of vectors: the nearest of 255 steps up to the largest number."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    step = largest * np.float32(1 / 127)
    with np.errstate(invalid="ignore", divide="ignore"):
        whole = np.rint(x * (np.float32(1) / step))
    whole = np.where(largest == 0, 0, whole)
    assert np.nanmax(np.abs(whole), initial=0) <= 127
    return whole.astype(np.float64) * step


def _given(options):
    near, sinks = options
    return {"near": near} | ({"sinks": jnp.asarray(SINKS)} if sinks else {})


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(attention, options, pages, rows, active, ends, q, k, v):
    """What `decoding.generate` does with a backend."""
    nears = options[:1]
    views = attention.open((pages,), rows, STEPS, nears)

    def advance(carry, now):
        view, positions, active = carry
        step, q, k, v = now
        mixed, view = attention.decode(
            view,
            q,
            k,
            v,
            rows=rows,
            step=step,
            positions=positions,
            active=active,
            **_given(options),
        )
        active = active & (step < ends)
        return (view, positions + active, active), mixed

    carry, found = jax.lax.scan(
        advance, (views[0], rows.starts, active), (jnp.arange(STEPS), q, k, v)
    )
    view, positions, _ = carry
    at = {"rows": rows, "positions": positions, "nears": nears}
    (pages,) = attention.close((pages,), (view,), **at)
    return pages, found


def tables(rng, num_pages, count, width):
    """Pages in no order; rows 0 and 1 share their first."""
    table = rng.permutation(num_pages)[: count * width].reshape(count, width)
    table[1, 0] = table[0, 0]
    return table.astype(np.int32)


NEVER = 99


@every_backend
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    starts=st.lists(st.integers(4, 11), min_size=4, max_size=4),
    active=st.lists(st.booleans(), min_size=4, max_size=4),
    ends=st.lists(st.sampled_from([0, 1, 3, NEVER]), min_size=4, max_size=4),
)
def test_calls_of_rows_that_begin_and_end_anywhere(name, seed, starts, active, ends):
    cache = Cache(BACKENDS[name], seed=seed)
    table = tables(cache.rng, cache.num_pages, 4, 5)
    starts, active = np.array(starts, np.int32), np.array(active)
    starts, active = cache.decode(table, starts, active, np.array(ends))
    cache.decode(table, starts, active, np.full(4, NEVER))


@every_backend
@pytest.mark.parametrize(
    "kv, group", [pytest.param(2, 1, id="own keys"), pytest.param(1, 4, id="one key")]
)
def test_queries_share_keys_in_groups(name, kv, group):
    cache = Cache(BACKENDS[name], kv=kv, group=group)
    table = tables(cache.rng, cache.num_pages, 3, 4)
    starts = np.array([4, 7, 0], np.int32)
    cache.decode(table, starts, np.ones(3, bool), np.full(3, NEVER))


@every_backend
def test_sequences_of_many_blocks_of_pages(name):
    cache = Cache(BACKENDS[name], num_pages=64, size=64)
    table = tables(cache.rng, cache.num_pages, 3, 20)
    starts = np.array([64, 1200, 510], np.int32)
    cache.decode(table, starts, np.ones(3, bool), np.full(3, NEVER))


@every_backend
def test_bfloat16_within_its_rounding(name):
    cache = Cache(BACKENDS[name], dtype="bfloat16")
    table = tables(cache.rng, cache.num_pages, 4, 5)
    starts, ends = np.array([4, 11, 0, 7], np.int32), np.array([NEVER, 1, NEVER, 0])
    cache.decode(table, starts, np.array([True, True, True, False]), ends)


QUANTIZED = {
    "paged": PagedAttention(),
    "rows": RowPagedAttention(),
    "gathered": GatheredAttention(),
    "pallas": QuantizedPallasAttention(make_mesh(jax.devices()[:1])),
    "triton": BACKENDS["triton"],
}
every_quantized_backend = pytest.mark.parametrize("name", sorted(QUANTIZED))


@every_quantized_backend
def test_int8_equals_attention_to_the_rounded_keys_and_values(name):
    """To float32's rounding: nothing is rounded but when it is stored."""
    cache = Cache(QUANTIZED[name], dtype="int8", size=128, num_pages=16)
    table = tables(cache.rng, cache.num_pages, 4, 4)
    starts = np.array([132, 381, 0, 127], np.int32)
    active, ends = np.array([True, True, True, False]), np.array([NEVER, 1, NEVER, 0])
    starts, active = cache.decode(table, starts, active, ends)
    cache.decode(table, starts, active, np.full(4, NEVER))
    # A prompt whose past is cached, and a whole one; the first continues in a chunk.
    pages = tables(cache.rng, cache.num_pages, 3, 4)
    prefill(cache, [(pages[0], 0, 5), (pages[2], 0, 11)])
    prefill(cache, [(pages[2], 11, 5), (pages[1], 0, 9)])


@pytest.mark.parametrize(
    "name, dtype",
    [
        *[(name, "float32") for name in sorted(BACKENDS.keys() - {"pallas"})],
        pytest.param("pallas", "float32", marks=pytest.mark.slow),
        ("paged", "int8"),
        ("rows", "int8"),
        ("gathered", "int8"),
        ("triton", "int8"),
        pytest.param("pallas", "int8", marks=pytest.mark.slow),
    ],
)
def test_a_row_with_a_nan_harms_no_other(name, dtype):
    backend = (QUANTIZED if dtype == "int8" else BACKENDS)[name]
    size = 128 if dtype == "int8" else 4
    cache = Cache(backend, dtype=dtype, size=size)
    table = tables(cache.rng, cache.num_pages, 3, 4)
    starts, trust = np.array([size, size + 3, 0]), np.array([True, False, True])
    starts = starts.astype(np.int32)
    q, k, v = (np.array(cache.random(STEPS, 3, heads)) for heads in (4, 2, 2))
    q[1, 1], k[1, 1, 0, 5], v[2, 1, 1, 7] = np.nan, np.nan, np.inf
    everyone, never = np.ones(3, bool), np.full(3, NEVER)
    cache.decode_with(table, starts, everyone, never, q, k, v, trust=trust)
    # Its pages are given to another sequence, which sees nothing of it.
    cache.decode(table[:, ::-1], np.zeros(3, np.int32), everyone, never)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefill(attention, options, pages, q, k, v, chunk):
    return attention.chunk(pages, q, k, v, chunk, **_given(options))


def prefill(cache, pieces, *, size=16, slots=5, nan_in=None):
    """A chunk of (pages, tokens cached before, tokens now), checked."""
    table = np.zeros((slots, len(pieces[0][0])), np.int32)
    positions, segments = np.zeros(size, np.int32), np.zeros(size, np.int32)
    starts, lengths = np.zeros(slots + 1, np.int32), np.zeros(slots, np.int32)
    filled = 0
    for place, (pages, past, count) in enumerate(pieces):
        table[place], lengths[place] = pages, past + count
        positions[filled : filled + count] = np.arange(past, past + count)
        segments[filled : filled + count] = place + 1
        filled += count
        starts[place + 1 :] = filled
    chunk = Chunk(
        tokens=jnp.zeros(size, jnp.int32),
        positions=jnp.asarray(positions),
        segments=jnp.asarray(segments),
        table=jnp.asarray(table),
        query_starts=jnp.asarray(starts),
        lengths=jnp.asarray(lengths),
        num_sequences=jnp.array([len(pieces)], jnp.int32),
    )
    q = cache.random(size, cache.kv * cache.group)
    k, v = cache.random(size, cache.kv), cache.random(size, cache.kv)
    if nan_in is not None:
        k, v = k.at[starts[nan_in], 0, 3].set(np.nan), v.at[starts[nan_in]].set(np.inf)
    found, cache.pages = _prefill(
        cache.attention, cache.options, cache.pages, q, k, v, chunk
    )
    for token in range(filled):
        pages = table[segments[token] - 1]
        page, offset = cache.place(pages, positions[token])
        cache.note(page, offset, k[token], v[token])
        if segments[token] - 1 != nan_in:
            expected = cache.expected(q[token], pages, positions[token] + 1)
            cache.close_to(found[token], expected)
    assert np.isfinite(np.asarray(found[filled:], np.float32)).all()
    cache.assert_pages()


@every_backend
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    past=st.integers(0, 7),
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    left=st.integers(1, 9),
)
def test_chunks_of_several_prompts(name, seed, past, counts, left):
    cache = Cache(BACKENDS[name], seed=seed)
    pages = tables(cache.rng, cache.num_pages, 5, 4)
    begun = [(pages[2], past, counts[0])]
    whole = [(each, 0, n) for each, n in zip(pages[3:], counts[1:], strict=False)]
    prefill(cache, begun + whole)
    # The last is cut at the end of its chunk, and the next chunk begins with it.
    prefill(cache, [(pages[0], 0, 5), (pages[2], 0, 11)])
    prefill(cache, [(pages[2], 11, min(left, 5)), (pages[4], 0, left)])


@every_backend
def test_chunks_of_long_prompts_in_bfloat16(name):
    cache = Cache(BACKENDS[name], num_pages=64, size=64, dtype="bfloat16")
    pages = tables(cache.rng, cache.num_pages, 3, 20)
    # Its queries within one block of the kernel: the interpreter forgets between
    # blocks in which buffer the first sequence's pages are.
    prefill(cache, [(pages[0], 1000, 30), (pages[2], 0, 90)], size=160)


@pytest.mark.parametrize("name", ["paged", "rows", "gathered", "pallas"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"near": Near(8)}, id="chunks"),
        pytest.param({"near": Near(6, sliding=True)}, id="windows"),
        pytest.param({"near": Near(6, sliding=True), "sinks": True}, id="sinks"),
    ],
)
def test_layers_that_see_a_part(name, options):
    """Rows in their first, second and third chunk of 8 tokens, and over an end."""
    if name == "pallas" and options.get("sinks"):
        pytest.skip("the kernel takes no sinks")
    cache = Cache(BACKENDS[name], **options)
    table = tables(cache.rng, cache.num_pages, 4, 6)
    starts = np.array([4, 14, 0, 16], np.int32)
    active, ends = np.array([True, True, True, False]), np.full(4, NEVER)
    starts, active = cache.decode(table, starts, active, ends)
    cache.decode(table, starts, active, np.array([NEVER, NEVER, 1, NEVER]))
    pages = tables(cache.rng, cache.num_pages, 3, 5)
    prefill(cache, [(pages[0], 5, 9), (pages[2], 0, 5)])


@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, "float32") for name in ("paged", "rows", "gathered", "pallas")),
        ("rows", "int8"),
        *(
            pytest.param(name, "int8", marks=pytest.mark.slow)
            for name in ("paged", "gathered", "pallas")
        ),
    ],
)
@pytest.mark.parametrize(
    "near",
    [
        pytest.param(Near(6, sliding=True, ring=5), id="windows"),
        pytest.param(Near(8, ring=6), id="chunks"),
    ],
)
def test_layers_that_keep_a_ring_of_pages(name, dtype, near, monkeypatch):
    """Of tables of ten pages: rows before, over and long after the ring's first end."""
    monkeypatch.setattr(kernels_int8, "_BLOCK_TOKENS", 256)  # a ring is three blocks
    backend, size = BACKENDS[name], 4
    if dtype == "int8":
        backend, size = QUANTIZED[name], 128
    longer = size // 4
    near = dataclasses.replace(near, tokens=longer * near.tokens)
    cache = Cache(backend, near=near, num_pages=50, size=size, dtype=dtype)
    table = cache.rng.permutation(50)[:40].reshape(4, 10).astype(np.int32)
    starts = longer * np.array([4, 18, 0, 32], np.int32)
    starts[3] -= 2  # and then over the end of a page
    active, ends = np.ones(4, bool), np.full(4, NEVER)
    starts, active = cache.decode(table, starts, active, ends)
    cache.decode(table, starts, active, np.array([NEVER, NEVER, 1, NEVER]))
    prefill(cache, [(table[0], 23 * longer, 9), (table[2], 0, 5)])


@pytest.mark.parametrize(
    "backend, near",
    [
        *(
            (backend, Near(6, sliding=True))
            for backend in (PagedAttention, RowPagedAttention, GatheredAttention)
        ),
        (
            functools.partial(
                TritonPagedAttention, make_mesh(jax.devices()[:1]), interpret=True
            ),
            None,
        ),
    ],
)
def test_scores_with_a_soft_cap(backend, near):
    cache = Cache(backend(cap=CAP), cap=CAP, near=near)
    table = tables(cache.rng, cache.num_pages, 3, 4)
    cache.decode(
        table, np.array([4, 7, 0], np.int32), np.ones(3, bool), np.full(3, NEVER)
    )
    pages = tables(cache.rng, cache.num_pages, 3, 5)
    prefill(cache, [(pages[0], 5, 9), (pages[2], 0, 5)])


@every_backend
def test_an_empty_chunk_writes_nothing(name):
    cache = Cache(BACKENDS[name])
    prefill(cache, [(np.zeros(4, np.int32), 0, 0)])


@every_backend
def test_a_prompt_with_a_nan_harms_no_other(name):
    cache = Cache(BACKENDS[name])
    pages = tables(cache.rng, cache.num_pages, 4, 4)
    prefill(cache, [(pages[0], 4, 4), (pages[2], 0, 5), (pages[3], 0, 6)], nan_in=1)
