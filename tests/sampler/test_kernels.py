"""JAX's TPU kernel beside plain XLA, and which backend a machine gets."""

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
    CudnnPagedAttention,
    PallasAttention,
    choose_attention,
    why_not_pallas,
)
from scalerl_jax.sampler.kernels_int8 import QuantizedPallasAttention
from scalerl_jax.sampler.paged import PagedAttention, RowPagedAttention
from scalerl_jax.sampler.stored import stored

HEADS, KV, DIM, SIZE, WIDTH = 4, 2, 128, 8, 3
PAGES = 4 * WIDTH
RNG = np.random.default_rng(0)
TABLE = RNG.permutation(PAGES).reshape(4, WIDTH).astype(np.int32)


def normal(count, heads, dtype="float32"):
    return jnp.asarray(RNG.normal(size=(count, heads, DIM)), dtype)


def full_pages(attention, k, v, *, size=SIZE, dtype=None):
    """Pages in which no place is empty."""
    page, offset = np.divmod(np.arange(len(k)), size)
    empty = attention.init_pages(
        len(k) // size, size, heads=KV, dim=DIM, dtype=dtype or k.dtype
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
    # 4 tokens after 9, 20 whole, 10 whose prompt goes on, and padding.
    counts, past, size = (4, 20, 10), (9, 0, 0), 40
    segments = np.repeat([1, 2, 3, 0], [*counts, size - sum(counts)])
    order = np.concatenate(
        [np.arange(n) + p for n, p in zip(counts, past, strict=True)]
    )
    starts = np.cumsum([0, *counts, 0, 0])
    chunk = Chunk(
        tokens=jnp.zeros(size, jnp.int32),
        positions=jnp.asarray(np.pad(order, (0, size - order.size)), jnp.int32),
        segments=jnp.asarray(segments, jnp.int32),
        table=jnp.asarray(np.pad(TABLE, ((0, 1), (0, 0)))),
        query_starts=jnp.asarray(starts, jnp.int32),
        lengths=jnp.array([13, 20, 10, 0, 0], jnp.int32),
        num_sequences=jnp.array([3], jnp.int32),
    )
    q, k, v = (normal(size, heads) for heads in (HEADS, KV, KV))

    def prefill(attention):
        return attention.chunk(full_pages(attention, *cached), q, k, v, chunk)

    (plain, _), (one, pages), (two, cut), (shared, copied) = four(prefill)
    np.testing.assert_allclose(one[:34], plain[:34], atol=1e-5)
    np.testing.assert_array_equal(one[34:], 0.0)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, devices, lengths, changes",
    [
        pytest.param(PallasAttention, 1, (1, 5, 17), {}, id="one device"),
        pytest.param(PallasAttention, 2, (1, 5, 17), {}, id="two devices"),
        pytest.param(PallasAttention, 1, (5, 120, 250), RINGS, id="rings"),
        pytest.param(
            QuantizedPallasAttention,
            2,
            (5, 120, 250),
            RINGS | {"kv_dtype": "int8"},
            id="rings in int8",
        ),
    ],
)
def test_an_engine_with_the_kernel_draws_the_slow_samplers_tokens(
    make_bench, monkeypatch, kernel, devices, lengths, changes
):
    # On a TPU by the name of "pallas", which is refused elsewhere.
    monkeypatch.setitem(
        kernels.ATTENTION, "interpreted", lambda settings, mesh: kernel(mesh)
    )
    plain = {"arch": small_architecture(vocab_size=13, head_dim=DIM)}
    bench = make_bench(
        attention="interpreted", devices=jax.devices()[:devices], **plain | changes
    )
    assert bench.settings.ring_pages == (2 if changes else 0)
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
        ("auto", "gpu", CudnnPagedAttention),
        ("auto", "cpu", GatheredAttention),
        ("paged", "tpu", RowPagedAttention),
        ("paged", "gpu", PagedAttention),
        ("gathered", "tpu", GatheredAttention),
        ("cudnn", "cpu", CudnnPagedAttention),
        ("pallas", "tpu", PallasAttention),
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
        ("gpu", 32, PagedAttention),  # cuDNN reads no integers
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
        ("gpu", {"attention": "cudnn"}, "reads no sampler.kv_dtype = 'int8': set"),
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


def test_the_kernel_is_refused_without_a_tpu():
    settings = dataclasses.replace(SETTINGS, attention="pallas")
    with pytest.raises(ValueError, match="needs TPUs, and the sampler has cpu"):
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
