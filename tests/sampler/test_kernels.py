"""JAX's kernels beside plain XLA, and which backend a machine gets."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import interpreted
from small_model import small_architecture

from scalerl_jax.model.architecture import LocalLayers
from scalerl_jax.model.rope import Rope
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.model.transformer import abstract_params
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.sampler import kernels, kernels_int8
from scalerl_jax.sampler.attention import (
    Chunk,
    GatheredAttention,
    Places,
    Rows,
)
from scalerl_jax.sampler.decoding import EngineSettings
from scalerl_jax.sampler.kernels import (
    PallasAttention,
    choose_attention,
    why_not_pallas,
)
from scalerl_jax.sampler.kernels_gpu import (
    CudnnPagedAttention,
    TritonPagedAttention,
    why_not_triton,
)
from scalerl_jax.sampler.kernels_int8 import QuantizedPallasAttention
from scalerl_jax.sampler.paged import PagedAttention, RowPagedAttention
from scalerl_jax.sampler.stored import stored

HEADS, KV, DIM, SIZE, WIDTH = 4, 2, 128, 8, 3
PAGES = 4 * WIDTH
RNG = np.random.default_rng(0)
FOR_GPUS = functools.partial(TritonPagedAttention, interpret=True)
TABLE = RNG.permutation(PAGES).reshape(4, WIDTH).astype(np.int32)


def normal(count, heads, dtype="float32", dim=DIM):
    return jnp.asarray(RNG.normal(size=(count, heads, dim)), dtype)


def full_pages(attention, k, v, *, size=SIZE, dtype=None):
    """Pages in which no place is empty."""
    page, offset = np.divmod(np.arange(len(k)), size)
    _, heads, dim = k.shape
    empty = attention.init_pages(
        len(k) // size, size, heads=heads, dim=dim, dtype=dtype or k.dtype
    )
    places = Places(page=jnp.asarray(page), offset=jnp.asarray(offset))
    return empty.put(stored(k, v, empty.dtype), places)


def meshes():
    """One device; two that share the heads; two copies that share the rows."""
    two = jax.devices()[:2]
    return [
        make_mesh(two[:1]),
        make_mesh(two, tensor=2),
        make_mesh(two, fsdp=2, expert=2),
    ]


def four(function, kernel=PallasAttention):
    """What plain XLA makes of it, and the kernel on each of the meshes."""
    plain = jax.jit(functools.partial(function, PagedAttention()))()
    with interpreted():
        return plain, *(
            jax.jit(functools.partial(function, kernel(mesh)))() for mesh in meshes()
        )


@pytest.mark.parametrize("dtype, bound", [("float32", 1e-5), ("bfloat16", 2.0**-6)])
def test_decoding_equals_plain_attention_on_one_device_and_on_two(dtype, bound):
    cached = normal(PAGES * SIZE, KV, dtype), normal(PAGES * SIZE, KV, dtype)
    q, k, v = (normal(4, heads, dtype) for heads in (HEADS, KV, KV))
    starts = jnp.array([0, 23, 7, 8], jnp.int32)
    active = jnp.array([True, True, True, False])

    def decode(attention):
        mixed, pages = attention.decode(
            full_pages(attention, *cached),
            q,
            k,
            v,
            rows=Rows(table=jnp.asarray(TABLE), starts=starts),
            step=jnp.int32(0),
            positions=starts,
            active=active,
        )
        return mixed[:3].astype(jnp.float32), pages

    (plain, _), (one, pages), (two, cut), (shared, copied) = four(decode)
    np.testing.assert_allclose(one, plain, atol=bound)
    np.testing.assert_array_equal(two, one)
    np.testing.assert_array_equal(shared, one)
    np.testing.assert_array_equal(cut.heads, pages.heads)
    np.testing.assert_array_equal(copied.heads, pages.heads)


# Group, dim, size and width: tables of two or more parts, the last of them longer.
ON_GPUS = [(1, 64, 16, 41), (4, 128, 128, 5), (8, 64, 128, 8)]


@pytest.mark.parametrize(
    "shape, dtype, cached, bound",
    [
        *((shape, "bfloat16", None, 2.0**-6) for shape in ON_GPUS),
        *((shape, "bfloat16", "int8", 2.0**-6) for shape in ON_GPUS),
        (ON_GPUS[0], "float32", "int8", 1e-5),
    ],
)
def test_decoding_on_gpus_equals_plain_attention(shape, dtype, cached, bound):
    """A row of one token, a full one, one that ends in a part, and an inactive one."""
    group, dim, size, width = shape
    table = RNG.permutation(4 * width).reshape(4, width).astype(np.int32)
    past = [normal(table.size * size, KV, dtype, dim) for _ in "kv"]
    q, k, v = (normal(4, heads, dtype, dim) for heads in (KV * group, KV, KV))
    starts = jnp.array([0, width * size - 1, 517, 8], jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def decode(attention, pages, table, starts):
        mixed, pages = attention.decode(
            pages,
            q,
            k,
            v,
            rows=Rows(table=table, starts=starts),
            step=jnp.int32(0),
            positions=starts,
            active=jnp.array([True, True, True, False]),
        )
        return mixed[:3].astype(jnp.float32), pages

    def found_by(attention):
        pages = full_pages(attention, *past, size=size, dtype=cached)
        return decode(attention, pages, jnp.asarray(table), starts)

    plain, held = found_by(PagedAttention())
    held = held.replace(keys=jnp.swapaxes(held.keys, -2, -1))
    for mesh in meshes() if dtype == "float32" else meshes()[:1]:
        found, pages = found_by(FOR_GPUS(mesh))
        np.testing.assert_allclose(found, plain, atol=bound, rtol=bound)
        for name, array in vars(held).items():
            np.testing.assert_array_equal(getattr(pages, name), array)


@pytest.mark.slow
def test_decoding_in_int8_equals_plain_attention_on_one_device_and_on_two(monkeypatch):
    """Rows of one block and of two, which come to both buffers."""
    monkeypatch.setattr(kernels_int8, "_BLOCK_TOKENS", 256)
    size = 128  # two pages are a block
    cached = normal(PAGES * size, KV), normal(PAGES * size, KV)
    q, k, v = (normal(4, heads) for heads in (HEADS, KV, KV))
    starts = jnp.array([0, 383, 127, 256], jnp.int32)
    active = jnp.array([True, True, True, False])

    def decode(attention):
        mixed, pages = attention.decode(
            full_pages(attention, *cached, size=size, dtype=jnp.int8),
            q,
            k,
            v,
            rows=Rows(table=jnp.asarray(TABLE), starts=starts),
            step=jnp.int32(0),
            positions=starts,
            active=active,
        )
        return mixed[:3], pages

    found = four(decode, QuantizedPallasAttention)
    (plain, _), (one, pages), (two, cut), (shared, copied) = found
    np.testing.assert_allclose(one, plain, atol=1e-5)
    for other, held in ((two, cut), (shared, copied)):
        np.testing.assert_allclose(other, one, atol=1e-6)
        jax.tree.map(np.testing.assert_array_equal, held, pages)


def test_chunks_equal_plain_attention_on_one_device_and_on_two():
    cached = normal(PAGES * SIZE, KV), normal(PAGES * SIZE, KV)
    # 4 tokens after 8, 3 after the same 8, 20 whole, 10 that go on, and padding.
    counts, past, size = (4, 3, 20, 10), (8, 8, 0, 0), 40
    segments = np.repeat([1, 2, 3, 4, 0], [*counts, size - sum(counts)])
    table = TABLE.copy()
    table[1, 0] = table[0, 0]
    order = np.concatenate(
        [np.arange(n) + p for n, p in zip(counts, past, strict=True)]
    )
    starts = np.cumsum([0, *counts, 0])
    chunk = Chunk(
        tokens=jnp.zeros(size, jnp.int32),
        positions=jnp.asarray(np.pad(order, (0, size - order.size)), jnp.int32),
        segments=jnp.asarray(segments, jnp.int32),
        table=jnp.asarray(np.pad(table, ((0, 1), (0, 0)))),
        query_starts=jnp.asarray(starts, jnp.int32),
        lengths=jnp.array([12, 11, 20, 10, 0], jnp.int32),
        num_sequences=jnp.array([4], jnp.int32),
    )
    q, k, v = (normal(size, heads) for heads in (HEADS, KV, KV))

    def prefill(attention):
        return attention.chunk(full_pages(attention, *cached), q, k, v, chunk)

    (plain, _), (one, pages), (two, cut), (shared, copied) = four(prefill)
    np.testing.assert_allclose(one[:37], plain[:37], atol=1e-5)
    np.testing.assert_array_equal(one[37:], 0.0)
    np.testing.assert_array_equal(two, one)
    np.testing.assert_array_equal(shared, one)
    np.testing.assert_array_equal(cut.heads, pages.heads)
    np.testing.assert_array_equal(copied.heads, pages.heads)


RINGS = dict(  # two pages of four in every second layer
    arch=small_architecture(
        vocab_size=13,
        head_dim=DIM,
        family="gemma3_text",
        windows=(70, 0),
        window_rope=Rope(100.0),
    ),
    page_size=128,
    max_prompt_tokens=260,
    max_completion_tokens=130,
)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "kernel, devices, lengths, changes",
    [
        slow(PallasAttention, 1, (1, 5, 17), {}, id="one device"),
        slow(PallasAttention, 2, (1, 5, 17), {}, id="two devices"),
        slow(PallasAttention, 1, (5, 120, 250), RINGS, id="rings"),
        slow(
            QuantizedPallasAttention,
            2,
            (5, 120, 250),
            RINGS | {"kv_dtype": "int8"},
            id="rings in int8",
        ),
        pytest.param(FOR_GPUS, 2, (1, 5, 17), {}, id="two GPUs"),
        slow(FOR_GPUS, 1, (1, 5, 17), {"kv_dtype": "int8"}, id="a GPU in int8"),
    ],
)
def test_an_engine_with_the_kernel_draws_the_slow_samplers_tokens(
    make_bench, monkeypatch, kernel, devices, lengths, changes
):
    # On its machine by the name of "pallas", which is refused on CPUs.
    monkeypatch.setitem(
        kernels.ATTENTION, "interpreted", lambda settings, mesh: kernel(mesh)
    )
    plain = {"arch": small_architecture(vocab_size=13, head_dim=DIM)}
    bench = make_bench(
        attention="interpreted", devices=jax.devices()[:devices], **plain | changes
    )
    assert bench.settings.ring_pages == (2 if changes.keys() >= RINGS.keys() else 0)
    rng = np.random.default_rng(5)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), leaf.dtype),
        abstract_params(bench.settings.arch, dtype=jnp.float32),
    )
    requests = [
        bench.request(number, rng.integers(0, 13, length), num_samples=2)
        for number, length in enumerate(lengths)
    ]
    with interpreted():
        found = bench.complete(params, *requests)
    bench.assert_same(found, bench.expected(params, *requests))
    longest = max(lengths[at] + len(each.tokens) for (at, _), each in found.items())
    assert longest > 2 * bench.settings.page_size  # over a ring's end


SETTINGS = EngineSettings(
    arch=ARCHITECTURES["llama3.1-8b"],
    slots=256,
    max_prompt_tokens=2048,
    max_completion_tokens=14336,
    tokens_per_call=16,
    dtype=jnp.bfloat16,
    eos_ids=(1,),
)


@dataclasses.dataclass(frozen=True)
class Described:
    """A device of a machine that is not here."""

    id: int
    platform: str


def machine(platform, tensor=1):
    """A mesh of devices that are not here."""
    devices = [Described(place, platform) for place in range(tensor)]
    return make_mesh(devices, tensor=tensor)


@pytest.mark.parametrize(
    "name, platform, expected",
    [
        ("auto", "tpu", PallasAttention),
        ("auto", "gpu", TritonPagedAttention),
        ("auto", "cpu", GatheredAttention),
        ("paged", "tpu", RowPagedAttention),
        ("paged", "gpu", PagedAttention),
        ("gathered", "tpu", GatheredAttention),
        ("cudnn", "cpu", CudnnPagedAttention),
        ("cudnn", "gpu", CudnnPagedAttention),
        ("pallas", "tpu", PallasAttention),
        ("pallas", "gpu", TritonPagedAttention),
    ],
)
def test_a_machine_gets_its_backend(name, platform, expected):
    settings = dataclasses.replace(SETTINGS, attention=name)
    assert type(choose_attention(settings, machine(platform))) is expected


@pytest.mark.parametrize(
    "platform, chunk, expected",
    [
        ("tpu", 64, PallasAttention),
        ("tpu", 50, RowPagedAttention),  # not of whole pages, which have 32 tokens
        ("gpu", 64, PagedAttention),
        ("cpu", 64, GatheredAttention),
    ],
)
def test_layers_that_see_chunks_get_a_backend_that_knows_them(
    platform, chunk, expected
):
    local = LocalLayers((True,) * SETTINGS.arch.num_layers, chunk, True, 0.1, 4)
    settings = changed(local=local)
    assert settings.near and settings.page_size == 32
    assert type(choose_attention(settings, machine(platform))) is expected


@pytest.mark.parametrize(
    "changes, platform, expected",
    [
        pytest.param({}, "gpu", "cudnn", id="bfloat16"),
        pytest.param({"dtype": jnp.float32}, "gpu", "xla", id="float32"),
        pytest.param({"head_dim": 256}, "gpu", "xla", id="long heads"),
        pytest.param({"head_dim": 36}, "gpu", "xla", id="odd heads"),
        pytest.param({}, "cpu", "xla", id="no GPU"),
    ],
)
def test_cudnn_gets_what_it_takes(changes, platform, expected):
    chosen = choose_attention(changed(**changes, attention="cudnn"), machine(platform))
    assert chosen._implementation == expected


@pytest.mark.parametrize(
    "platform, page_size, expected",
    [
        ("tpu", 128, QuantizedPallasAttention),
        ("gpu", 32, TritonPagedAttention),
        ("cpu", 32, GatheredAttention),
    ],
)
def test_a_cache_in_int8_gets_a_backend_that_reads_it(platform, page_size, expected):
    settings = dataclasses.replace(SETTINGS, kv_dtype="int8", page_size=page_size)
    assert type(choose_attention(settings, machine(platform))) is expected


@pytest.mark.parametrize(
    "platform, changes, message",
    [
        ("tpu", {}, "kv_dtype = 'int8' with sampler.page_size = 32: set it to 128"),
        ("tpu", {"attention": "pallas"}, "sampler.page_size = 32: set it to 128"),
        ("gpu", {"attention": "cudnn"}, "support sampler.kv_dtype = 'int8'; set"),
    ],
)
def test_a_cache_in_int8_is_refused_where_nothing_reads_it(platform, changes, message):
    settings = dataclasses.replace(SETTINGS, kv_dtype="int8", **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        choose_attention(settings, machine(platform))


def test_an_unknown_backend_is_answered_with_the_known_ones():
    settings = dataclasses.replace(SETTINGS, attention="flash")
    with pytest.raises(ValueError, match=r"sampler\.attention = 'flash'"):
        choose_attention(settings, machine("tpu"))


def test_the_kernels_are_refused_on_a_cpu():
    settings = dataclasses.replace(SETTINGS, attention="pallas")
    with pytest.raises(ValueError, match="needs TPUs or GPUs, and the sampler has cpu"):
        choose_attention(settings, meshes()[1])


def changed(*, arch=None, **changes):
    """Settings, or their architecture, with other fields."""
    fields = {field.name for field in dataclasses.fields(SETTINGS.arch)}
    of_arch = {name: changes.pop(name) for name in fields & changes.keys()}
    shape = dataclasses.replace(arch or SETTINGS.arch, **of_arch)
    return dataclasses.replace(SETTINGS, arch=shape, **changes)


REFUSED = [
    pytest.param(dict(head_dim=64), 1, "head_dim = 64: it must be 128", id="dim"),
    pytest.param(dict(head_dim=256), 1, "head_dim = 256: it must be 128", id="256"),
    pytest.param(dict(num_kv_heads=4), 8, "mesh.tensor = 8 with 4 kv", id="cut head"),
    pytest.param(
        dict(num_kv_heads=6, num_heads=24),
        1,
        "6 kv heads over mesh.tensor = 1: 6 on a device must be 1, 2, 4 or",
        id="six heads",
    ),
    pytest.param(
        dict(num_kv_heads=32, dtype=jnp.float32),
        1,
        "raise mesh.tensor = 1 until 4 are left",
        id="float32 without groups",
    ),
    pytest.param(
        dict(dtype=jnp.float16), 1, "model.sampler_dtype = float16", id="float16"
    ),
    pytest.param(
        dict(slots=512), 1, "raise sampler.page_size = 32 or lower", id="table"
    ),
    pytest.param(
        dict(page_size=1024), 1, "sampler.page_size = 1024: set it to 512", id="page"
    ),
    pytest.param(dict(attention_cap=50.0), 1, "scores have a soft cap", id="cap"),
]


@pytest.mark.parametrize("changes, tensor, message", REFUSED)
def test_shapes_that_the_kernel_does_not_take(changes, tensor, message):
    settings, mesh = changed(**changes), machine("tpu", tensor)
    assert type(choose_attention(settings, mesh)) is RowPagedAttention  # auto
    with pytest.raises(ValueError, match=r"^sampler\.attention = 'pallas'") as error:
        choose_attention(dataclasses.replace(settings, attention="pallas"), mesh)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "changes, tensor",
    [
        *(({}, tensor) for tensor in (1, 2, 4, 8)),
        ({"dtype": jnp.float32}, 1),
        ({"num_heads": 28, "num_kv_heads": 4}, 1),
        ({"num_heads": 64, "num_kv_heads": 64}, 4),
        ({"slots": 1024, "page_size": 128}, 8),
    ],
)
def test_shapes_that_the_kernel_takes(changes, tensor):
    assert why_not_pallas(changed(**changes), tensor=tensor) is None


REFUSED_ON_GPUS = [
    pytest.param(dict(head_dim=96), 1, "head_dim = 96: it must be a power", id="dim"),
    pytest.param(dict(head_dim=8), 1, "of two from 16 to 512", id="short heads"),
    pytest.param(dict(head_dim=1024), 1, "of two from 16 to 512", id="long heads"),
    pytest.param(dict(page_size=24), 1, "sampler.page_size = 24: set", id="page"),
    pytest.param(dict(page_size=256), 1, "a power of two, 128 or less", id="long page"),
    pytest.param(dict(num_kv_heads=4), 8, "mesh.tensor = 8 with 4 kv", id="cut head"),
    pytest.param(dict(dtype=jnp.float16), 1, "dtype = float16: set it", id="float16"),
    pytest.param(dict(sinks=True), 1, "a model whose heads have sinks", id="sinks"),
    pytest.param(
        dict(windows=(64,) * 32), 1, "whose layers see windows of 64", id="windows"
    ),
    pytest.param(
        dict(kv_dtype="int8", cache_tokens=3_000_000),
        1,
        "3000000 tokens in int8, whose layer has between 2**31 and 2**32 numbers: set "
        "sampler.cache_tokens to 2097152 or less",
        id="signed places",
    ),
]


@pytest.mark.parametrize("changes, tensor, message", REFUSED_ON_GPUS)
def test_shapes_that_the_kernel_for_gpus_does_not_take(changes, tensor, message):
    settings, mesh = changed(**changes), machine("gpu", tensor)
    assert type(choose_attention(settings, mesh)) is PagedAttention  # auto
    with pytest.raises(ValueError, match=r"^sampler\.attention = 'pallas'") as error:
        choose_attention(dataclasses.replace(settings, attention="pallas"), mesh)
    assert message in str(error.value)


def test_models_in_float32_keep_their_products_on_gpus():
    settings, mesh = changed(dtype=jnp.float32), machine("gpu")
    assert type(choose_attention(settings, mesh)) is CudnnPagedAttention  # by XLA
    with pytest.raises(ValueError, match="model.sampler_dtype = float32: set"):
        choose_attention(dataclasses.replace(settings, attention="pallas"), mesh)


@pytest.mark.parametrize(
    "changes, tensor",
    [
        ({"head_dim": 64, "num_heads": 14, "num_kv_heads": 2}, 2),
        ({"head_dim": 256, "attention_cap": 50.0}, 1),
        ({"head_dim": 16, "page_size": 1}, 8),
        ({"kv_dtype": "int8", "cache_tokens": 3_000_000}, 2),
    ],
)
def test_shapes_that_the_kernel_for_gpus_takes(changes, tensor):
    assert why_not_triton(changed(**changes), tensor=tensor) is None
