"""The kernels that run on a CPU against the dense softmax, and who gets which.

cuDNN's cannot even be lowered without its library: of it only the places of segments
that it is told are checked here.  Its outputs and gradients were compared on an H100,
see docs/learner.md.
"""

import dataclasses

import dense_attention
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run
from attention_gpu import both_passes
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_mask,
)
from small_mesh import mesh_of
from small_model import small_architecture

from scalerl_jax.controller.mismatch import MismatchCheck, as_sequence
from scalerl_jax.model import attention_kernels
from scalerl_jax.model.attention import BlockwiseAttention
from scalerl_jax.model.attention_kernels import (
    CudnnAttention,
    SplashAttention,
    choose_attention,
    needed_blocks,
    segment_places,
)
from scalerl_jax.model.local_layers import chunked
from scalerl_jax.model.splash_gradient import following_blocks
from scalerl_jax.model.transformer import REMAT
from scalerl_jax.objective.assembly import make_pack
from scalerl_jax.sampler.requests import Completion
from scalerl_jax.types import Prompt
from scalerl_jax.wiring.learning import make_attention

LENGTH, HEADS = 512, 4
SEGMENTS = 5


# Blocks of 128, of which any may be skipped, in the whole row and in halves of it.  The
# gradients of all four blocks of keys are held at once, or of three and then of one.
@pytest.mark.parametrize(
    "shape, kv_heads, held",
    [
        pytest.param((1, 1, 1, 1), 2, 4, marks=pytest.mark.slow),
        ((1, 1, 1, 1), 4, 3),
        ((1, 1, 2, 2), 2, 3),
        pytest.param((2, 1, 1, 2), 4, 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_splash_gives_values_and_gradients_of_the_dense(shape, kv_heads, held):
    attention = SplashAttention(
        mesh_of(shape), block=128, held=held * 128 * 2 * 4 * 128, interpret=True
    )
    run = both_passes(attention)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        q, k, v, cotangent = dense_attention.random_inputs(
            rng, rows=2, length=LENGTH, heads=HEADS, kv_heads=kv_heads, dim=128
        )
        segment_ids = dense_attention.rows_of_segments(rng, 2, LENGTH)
        real = (segment_ids > 0)[..., None, None]
        cotangent *= real
        arguments = (q, k, v, segment_ids, cotangent)
        found, gradients = run(*arguments)
        expected, expected_gradients = dense_attention.attend(*arguments)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found * real, expected * real, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)


# Forward and backward, and with nothing saved the forward pass again.
@pytest.mark.parametrize("remat, kernels", [("attention", 2), ("dots", 2), ("full", 3)])
@pytest.mark.parametrize("name", ["splash", "cudnn"])
def test_the_backward_pass_of_a_kernel_reads_what_a_policy_saved(
    monkeypatch, name, remat, kernels
):
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 99999)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    attention, kernel = {
        "splash": (
            SplashAttention(mesh_of((1, 1, 2, 1)), block=128, interpret=True),
            "pallas_call[",
        ),
        "cudnn": (CudnnAttention(mesh_of((1, 2, 1, 1)), 4), "_wrapper["),
    }[name]
    ids = jnp.ones((2, 256), jnp.int32)

    def loss(x):
        run = jax.checkpoint(lambda x: attention(x, x, x, ids), policy=REMAT[remat])
        return run(x).sum()

    x = jax.ShapeDtypeStruct((2, 256, 2, 128), jnp.bfloat16)
    assert str(jax.make_jaxpr(jax.grad(loss))(x)).count(kernel) == kernels


@pytest.mark.slow
def test_bfloat16_gradients_are_no_further_off_than_jaxs_own():
    """JAX's two backward kernels, on one segment, and the dense softmax in float32."""
    rng = np.random.default_rng(3)
    arrays = dense_attention.random_inputs(
        rng, rows=1, length=256, heads=HEADS, kv_heads=2, dim=128
    )
    q, k, v, cotangent = (jnp.asarray(each, jnp.bfloat16) for each in arrays)
    ids = np.ones((1, 256), np.int32)
    whole = [np.asarray(each, np.float32) for each in (q, k, v)]
    _, expected = dense_attention.attend(*whole, ids, np.asarray(cotangent, np.float32))
    ours = SplashAttention(mesh_of((1, 1, 1, 1)), block=128, interpret=True)
    _, found = both_passes(ours)(q, k, v, ids, cotangent)
    theirs = splash.make_splash_mha(
        splash_mask.MultiHeadMask([splash_mask.CausalMask((256, 256))] * HEADS),
        block_sizes=splash.BlockSizes(*[128] * 8),
        head_shards=1,
        q_seq_shards=1,
        interpret=True,
    )

    def alone(q, k, v, _):
        q, k, v = (x[0].swapaxes(0, 1) for x in (q * 128**-0.5, k, v))
        return theirs(q, k, v).swapaxes(0, 1)[None]

    _, peers = both_passes(alone)(q, k, v, ids, cotangent)
    for each, peer, exact in zip(found, peers, expected, strict=True):
        errors = [np.linalg.norm(np.float32(x) - exact) for x in (each, peer)]
        assert errors[0] < 1.05 * errors[1] < 0.01 * np.linalg.norm(exact)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(2, 8), (4, 4), (8, 1)]))
def test_needed_blocks_are_those_with_a_pair_that_sees(seed, sizes):
    size, parts = sizes
    length = 4 * size * parts
    ids = dense_attention.rows_of_segments(np.random.default_rng(seed), 1, length)
    seen = dense_attention.seen(ids)[0] & (ids[0] > 0)
    seen |= np.eye(length, dtype=bool)  # padding sees itself
    expected = seen.reshape(length // size, size, -1, size).any(axis=(1, 3))
    of_parts = jnp.split(jnp.arange(length), parts)
    row = jnp.asarray(ids[0])
    found = [needed_blocks(places, row, size=size) for places in of_parts]
    assert (np.concatenate(found) == expected).all()


def test_a_grid_fetches_needed_blocks_only_and_each_before_it_is_due():
    """Along the order in which a grid runs, no fetch is made twice or in vain."""
    needed = jnp.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]], bool)
    mask = attention_kernels._mask(needed, jnp.arange(3))
    assert mask.block_mask[0].tolist() == needed.astype(int).tolist()
    assert mask.data_next[0].tolist() == [[0, 0, 0], [0, 1, 2], [2, 2, 2]]
    # Of the last keys alone no block of the first queries is needed.
    assert following_blocks(needed[:, 2:]).tolist() == [[0], [0], [0]]


def test_places_of_segments_by_hand():
    rows = [[1, 1, 1, 2, 3, 3, 0, 0], [0] * 8, [1] * 8, [1, 1, 2, 3, 4, 5, 5, 5]]
    lengths, starts = segment_places(jnp.array(rows), SEGMENTS)
    none = [-1] * SEGMENTS
    assert lengths.tolist() == [
        [3, 1, 2, -1, -1],
        none,
        [8, *none[1:]],
        [2, 1, 1, 1, 3],
    ]
    assert starts.tolist() == [
        [0, 3, 4, -1, -1, -1],
        [*none, -1],
        [0, *none],
        [0, 2, 3, 4, 5, -1],
    ]


@given(seed=st.integers(0, 2**32 - 1), chunk=st.integers(1, 20))
@example(seed=0, chunk=8)
@settings(max_examples=50)
def test_tokens_share_a_chunk_where_they_share_a_segment_and_its_part(seed, chunk):
    ids = dense_attention.rows_of_segments(np.random.default_rng(seed), 3, 8)
    found = np.asarray(chunked(jnp.asarray(ids), chunk))
    for row, own in zip(ids, found, strict=True):
        parts = (np.arange(8) - [list(row).index(each) for each in row]) // chunk
        together = (row == row[:, None]) & (parts == parts[:, None])
        assert ((own == own[:, None]) == together).all()
    # cuDNN, which takes rows of at most a chunk, looks for the segments' own ids.
    assert chunk < 8 or (found == ids).all()


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_cudnn_is_given_every_segment_at_its_own_place(seed):
    rng = np.random.default_rng(seed)
    ids = dense_attention.rows_of_segments(rng, 3, 16)
    places = segment_places(jnp.asarray(ids), SEGMENTS)
    q, kv = (jnp.zeros((3, 16, heads, 8)) for heads in (4, 4))
    # JAX's own translation into the lists that cuDNN reads; offsets are of values.
    lengths, _, offsets, _ = cudnn._fix_seqlen_offsets(
        *[each for each in places for _ in range(2)], q, kv
    )
    expected = [
        (row * 16 + int(np.argmax(ids[row] == number)), int((ids[row] == number).sum()))
        for row in range(3)
        for number in range(1, ids[row].max() + 1)
    ]
    starts, counts = np.ravel(offsets) // (4 * 8), np.ravel(lengths)
    found = list(zip(starts.tolist(), counts.tolist(), strict=False))
    assert found[: len(expected)] == expected
    assert not counts[len(expected) :].any()
    assert (starts[len(expected) :] == ids.size).all()  # where the last one ends


@dataclasses.dataclass(frozen=True)
class Described:
    """A device of a machine that is not here."""

    id: int
    platform: str
    compute_capability: str = "9.0"


ARCH = small_architecture(head_dim=128)
SHARED = dict(row_tokens=512, row_segments=SEGMENTS, block=64)


def choose(
    name,
    platform,
    *,
    arch=ARCH,
    context=1,
    dtype="bfloat16",
    capability="9.0",
    **changes,
):
    devices = [Described(place, platform, capability) for place in range(context)]
    mesh = mesh_of((1, 1, context, 1), devices)
    options = SHARED | changes
    return choose_attention(
        name, arch=arch, mesh=mesh, dtype=jnp.dtype(dtype), **options
    )


@pytest.mark.parametrize(
    "name, platform, changes, expected",
    [
        pytest.param("auto", "cpu", {}, BlockwiseAttention, id="cpu"),
        pytest.param("auto", "tpu", {}, SplashAttention, id="tpu"),
        pytest.param("auto", "gpu", {}, CudnnAttention, id="gpu"),
        pytest.param("splash", "tpu", dict(context=4), SplashAttention, id="context"),
        pytest.param("blockwise", "gpu", {}, BlockwiseAttention, id="by name"),
        pytest.param(
            "auto",
            "tpu",
            dict(arch=small_architecture(head_dim=64)),
            BlockwiseAttention,
            id="heads that splash does not take",
        ),
        pytest.param(
            "auto", "tpu", dict(row_tokens=500), BlockwiseAttention, id="odd rows"
        ),
        pytest.param(
            "auto", "gpu", dict(dtype="float32"), BlockwiseAttention, id="float32"
        ),
        pytest.param("auto", "gpu", dict(context=2), BlockwiseAttention, id="cut rows"),
    ],
)
def test_a_machine_gets_what_it_can_run(name, platform, changes, expected):
    found = choose(name, platform, **changes)
    assert type(found) is expected
    if expected is BlockwiseAttention:
        assert found.block == 64
    if expected is SplashAttention:
        assert (found.block, found.interpret) == (512, False)


@pytest.mark.parametrize("packing, segments", [(True, 3), (False, 1)])
def test_no_row_has_more_segments_than_attention_is_told_of(packing, segments):
    """cuDNN's knows no others: neither those of a step nor those of the first check."""
    config = small_run.make_config(
        {
            "batch.packing": packing,
            "batch.row_segments": 3,
            "batch.rows_per_microbatch": 1,
            "model.compute_dtype": "bfloat16",
        }
    )
    gpu = mesh_of((1, 1, 1, 1), [Described(0, "gpu")])
    attention = make_attention(config, ARCH, gpu)
    assert isinstance(attention, CudnnAttention) and attention.segments == segments

    prompt = Prompt(
        prompt_id=0,
        epoch=0,
        task="chain_sum",
        text="1 + 1 =",
        tokens=np.arange(2, dtype=np.int32),
        reference={},
    )
    scored = []

    def score(state, batch):
        scored.append(batch)
        return np.zeros(batch.tokens.shape, np.float32)

    check = MismatchCheck(
        score=score,
        pack=make_pack(config, ARCH)[0],
        max_mismatch_nats=0.1,
    )
    sampled = [(prompt, completion_of(length)) for length in (3, 4, 5, 6)]
    assert check(None, sampled).tokens == 3 + 4 + 5 + 6
    sequences = [as_sequence(*each) for each in sampled]
    for batch in (*scored, make_pack(config, ARCH)[0](sequences).batch):
        assert batch.segment_ids.max() == segments
        assert len(batch.tokens) == -(-4 // segments)


def completion_of(length):
    return Completion(
        request_id=0,
        sample=0,
        tokens=np.arange(length, dtype=np.int32),
        mask=np.ones(length, bool),
        logprobs=np.zeros(length, np.float32),
        full_logprobs=np.zeros(length, np.float32),
        top_tokens=np.zeros((length, 0), np.int32),
        top_logprobs=np.zeros((length, 0), np.float32),
        versions=np.zeros(length, np.int32),
        cut_off=True,
        interrupted=False,
    )


@pytest.mark.parametrize(
    "name, platform, changes, message",
    [
        pytest.param(
            "flash",
            "cpu",
            {},
            r"model\.attention = 'flash'",
            id="unknown",
        ),
        pytest.param(
            "splash", "gpu", {}, r"'splash' .* gpu devices: it needs TPUs", id="no TPU"
        ),
        pytest.param(
            "splash",
            "tpu",
            dict(arch=small_architecture(head_dim=64)),
            r"head_dim = 64: .*model\.attention = 'auto'",
            id="heads for splash",
        ),
        pytest.param(
            "splash",
            "tpu",
            dict(row_tokens=640, context=2),
            r"batch\.row_tokens = 640 .*mesh\.context = 2",
            id="shards for splash",
        ),
        pytest.param(
            "splash",
            "tpu",
            dict(arch=small_architecture(head_dim=128, attention_cap=50.0)),
            r"scores have a soft cap; or set model\.attention = 'auto'",
            id="cap for splash",
        ),
        pytest.param(
            "cudnn", "cpu", {}, r"'cudnn' .* cpu devices: it needs GPUs", id="no GPU"
        ),
        pytest.param(
            "cudnn",
            "gpu",
            dict(capability="gfx942"),
            "compute capability gfx942: ",
            id="AMD's GPU for cudnn",
        ),
        pytest.param(
            "cudnn",
            "gpu",
            dict(capability="8.0"),
            r"compute capability 8\.0: packed rows need 9\.0",
            id="an old GPU for cudnn",
        ),
        pytest.param(
            "cudnn",
            "gpu",
            dict(dtype="float32"),
            r"model\.compute_dtype = float32: ",
            id="float32 for cudnn",
        ),
        pytest.param(
            "cudnn",
            "gpu",
            dict(arch=small_architecture(head_dim=256)),
            "head_dim = 256: ",
            id="heads for cudnn",
        ),
        pytest.param(
            "cudnn",
            "gpu",
            dict(context=2),
            r"mesh\.context = 2: set it to 1",
            id="cut rows for cudnn",
        ),
    ],
)
def test_what_a_kernel_does_not_take_is_refused_with_the_way_out(
    name, platform, changes, message
):
    with pytest.raises(ValueError, match=message):
        choose(name, platform, **changes)
