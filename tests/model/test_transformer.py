"""The forward pass against transformers, and its two forms against each other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_mesh import mesh_of
from small_model import small_architecture

from scalerl_jax.model.architecture import param_shardings
from scalerl_jax.model.attention import BlockwiseAttention
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.layers import rms_norm
from scalerl_jax.model.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
    rope_frequencies,
    rotate,
    rotations,
)
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.model.transformer import (
    REMAT,
    abstract_params,
    cached_hidden,
    head_logits,
    head_weights,
    hidden_states,
    unstack_layers,
)
from scalerl_jax.model.weights import load_params

ARCH = small_architecture(vocab_size=32)
LOOSE_ROWS = np.random.default_rng(0).integers(0, ARCH.vocab_size, (3, 9))


@functools.partial(jax.jit, static_argnames=("arch", "remat"))
def forward(params, arch, tokens, positions, segment_ids, remat="none"):
    hidden, said = hidden_states(
        params,
        arch,
        tokens,
        positions=positions,
        segment_ids=segment_ids,
        dtype=jnp.float32,
        remat=remat,
    )
    assert not said or arch.experts
    return hidden


def forward_rows(params, arch, tokens, **options):
    """Rows of one segment each."""
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward(params, arch, tokens, positions, jnp.ones_like(tokens), **options)


def logits_of(params, hidden, arch):
    weights, cap = head_weights(params), arch.logit_cap
    return head_logits(hidden, weights, float32_head=True, cap=cap)


@pytest.fixture(scope="module")
def params(random_params):
    return random_params(ARCH)


def empty_cache(arch, rows, length):
    """Per layer the keys and the values of every row, densely: [2, R, S, kv, dim]."""
    shape = (2, rows, length, arch.num_kv_heads, arch.head_dim)
    return (jnp.zeros(shape),) * arch.num_layers


@functools.partial(jax.jit, static_argnames="arch")
def decode(params, arch, tokens, cache, positions, rows):
    """Hidden states of some tokens, each of a row of the cache, and the cache after.

    Several tokens of a row may come at once, in any order.
    """
    cache = list(cache)

    def attend(layer, q, k, v):
        cache[layer] = cache[layer].at[:, rows, positions].set(jnp.stack([k, v]))
        keys, values = cache[layer][:, rows]
        q = q.reshape(len(tokens), arch.num_kv_heads, -1, arch.head_dim)
        scores = jnp.einsum("tkgd,tskd->tkgs", q, keys) / arch.head_dim**0.5
        order = jnp.arange(keys.shape[1])
        if arch.attention_cap:
            scores = arch.attention_cap * jnp.tanh(scores / arch.attention_cap)
        seen = order <= positions[:, None]
        if arch.local is not None and arch.local.with_positions[layer]:
            seen &= order >= positions[:, None] // arch.local.chunk * arch.local.chunk
        if arch.windows and arch.windows[layer]:
            seen &= order > positions[:, None] - arch.windows[layer]
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        if arch.sinks:
            sinks = params["layers"]["sinks"][layer].reshape(1, *scores.shape[1:3], 1)
            sinks = jnp.broadcast_to(sinks, (*scores.shape[:3], 1))
            scores = jnp.concatenate([scores, sinks], axis=-1)
        shares = jax.nn.softmax(scores)[..., : keys.shape[1]]
        mixed = jnp.einsum("tkgs,tskd->tkgd", shares, values)
        return mixed.reshape(len(tokens), arch.num_heads, arch.head_dim)

    hidden, _ = cached_hidden(
        unstack_layers(params, arch),
        arch,
        tokens,
        positions=positions,
        attend=attend,
        dtype=jnp.float32,
    )
    return hidden, tuple(cache)


@functools.partial(jax.jit, static_argnames="arch")
def decode_greedily(params, arch, tokens, cache, positions, rows):
    """The most likely token after each of these, and the cache after them."""
    hidden, cache = decode(params, arch, tokens, cache, positions, rows)
    return logits_of(params, hidden, arch).argmax(-1), cache


def greedy_continuations(params, arch, prompts, new_tokens):
    """Prompts in one pass, as a pack of tokens; then a token of each per pass.

    The later passes are filled up with tokens of a row that nobody reads: they then
    have the program of the first.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    count, size = len(prompts), sum(lengths)
    cache = empty_cache(arch, count + 1, max(lengths) + new_tokens)
    following, cache = decode_greedily(
        params,
        arch,
        np.concatenate(prompts),
        cache,
        np.concatenate([np.arange(length) for length in lengths]),
        np.repeat(np.arange(count), lengths),
    )
    following = np.asarray(following)[np.cumsum(lengths) - 1]
    rows = np.minimum(np.arange(size), count)
    continuations = [following]
    for extra in range(new_tokens - 1):
        tokens, positions = np.zeros((2, size), int)
        tokens[:count], positions[:count] = following, lengths + extra
        following, cache = decode_greedily(params, arch, tokens, cache, positions, rows)
        following = np.asarray(following)[:count]
        continuations.append(following)
    return np.stack(continuations, axis=1)


def test_logits_match_transformers(hugging_face):
    arch = read_architecture(hugging_face.directory)
    loaded = load_params(hugging_face.directory, arch, dtype=jnp.float32)
    tokens = np.random.default_rng(0).integers(0, arch.vocab_size, 100)
    hidden = forward_rows(loaded, arch, tokens[None])
    expected = hugging_face.logits(tokens.tolist())
    atol = 5e-5 * max(1.0, expected.std())
    found = jax.jit(logits_of, static_argnums=2)(loaded, hidden, arch)[0]
    np.testing.assert_allclose(found, expected, atol=atol)
    assert expected.std() > 0.1  # else the tolerance would say nothing


def test_greedy_continuations_match_transformers(hugging_face):
    import torch

    arch = read_architecture(hugging_face.directory)
    loaded = load_params(hugging_face.directory, arch, dtype=jnp.float32)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, arch.vocab_size, n).tolist() for n in (3, 11, 7)]
    ours = greedy_continuations(loaded, arch, prompts, 20)
    for prompt, continuation in zip(prompts, ours, strict=True):
        theirs = hugging_face.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :]
        assert continuation.tolist() == theirs.tolist()


def test_parameter_count_matches_transformers(hugging_face):
    arch = read_architecture(hugging_face.directory)
    assert arch.num_params == hugging_face.model.num_parameters()


@pytest.mark.parametrize(
    "name, count",
    [
        ("llama3.1-8b", 8_030_261_248),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("scout", 107_769_861_120),
        ("mistral-7b", 7_248_023_552),
        ("olmo2-7b", 7_298_617_344),
        ("olmo3-7b", 7_298_011_136),
        ("gemma2-2b", 2_614_341_888),
        ("gemma3-1b", 999_885_952),
        ("smollm3-3b", 3_075_098_624),
        ("gpt-oss-20b", 20_914_757_184),
    ],
)
def test_named_architectures_have_the_published_number_of_parameters(name, count):
    assert ARCHITECTURES[name].num_params == count


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_flops_are_those_of_matmuls(family, tied):
    """Biases of queries, keys and values and norms of all kinds are none."""
    arch = small_architecture(family=family, tied_embeddings=tied)
    # Per layer q 16x32, k and v 16x16, o 32x16, three of 16x24; a head of 16x16; and
    # scores and mixing of 4 heads of 8 with 10 tokens.
    layer = 2 * (16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 24) + 2 * 2 * 4 * 8 * 10
    assert arch.flops_per_token(10.0, head=False) == 2 * layer
    assert arch.flops_per_token(10.0) == 2 * layer + 2 * 16 * 16


def test_a_layer_with_a_window_attends_to_no_more():
    """Of 10 tokens the last attends to 4, and all of a row to 1 + 2 + 3 + 7 x 4."""
    plain = small_architecture(family="olmo3")
    arch = dataclasses.replace(plain, windows=(4, 0))
    less = 4 * 4 * 8 * (10 - 4)  # scores and mixing of 4 heads of 8
    assert plain.flops_per_token(10.0) - arch.flops_per_token(10.0) == less
    assert arch.flops_per_token(3.0) == plain.flops_per_token(3.0)
    assert (plain.seen_in_rows(10), arch.seen_in_rows(10)) == (55 + 55, 34 + 55)


ROPES = {
    "default": (None, {}),
    "llama3": (
        Llama3Scaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=8192,
        ),
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "linear": (LinearScaling(4.0), {"factor": 4.0}),
    "dynamic": (DynamicScaling(4.0), {"factor": 4.0}),
    "yarn": (
        YarnScaling(16.0, 4096),
        {"factor": 16.0, "original_max_position_embeddings": 4096},
    ),
    "yarn with all fields": (
        YarnScaling(
            16.0,
            4096,
            beta_fast=20.0,
            beta_slow=2.0,
            truncate=False,
            attention_factor=2,
        ),
        {
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "truncate": False,
            "attention_factor": 2.0,
        },
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies_match_transformers(name):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    scaling, said = ROPES[name]
    rope = {"rope_type": name.partition(" ")[0], "rope_theta": 500_000.0} | said
    config = transformers.LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131_072,
        rope_parameters=rope,
    )
    theirs = modeling.LlamaRotaryEmbedding(config)
    ours = Rope(500_000.0, scaling)
    found = rope_frequencies(ours, 128)
    np.testing.assert_allclose(found, theirs.inv_freq.numpy(), rtol=1e-5)
    assert ours.magnitude == pytest.approx(theirs.attention_scaling)


def test_llama3_scaling_by_hand():
    scaling = Llama3Scaling(
        factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=50
    )
    # Frequencies 1 and 0.1 radians per position.
    arch = dataclasses.replace(ARCH, head_dim=4, rope_theta=100.0, rope_scaling=scaling)
    # 50 / (2 pi) = 7.96 turns: kept; 0.796 turns: divided by 4.
    np.testing.assert_allclose(
        rope_frequencies(arch.rope, arch.head_dim), [1.0, 0.025], rtol=1e-6
    )


@given(shift=st.integers(0, 500), distance=st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_rotated_products_depend_on_distance_alone(shift, distance):
    frequencies = rope_frequencies(ARCH.rope, ARCH.head_dim)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, ARCH.head_dim))

    def product(offset):
        turned_q = rotate(q, rotations(jnp.array([offset + distance]), frequencies))
        turned_k = rotate(k, rotations(jnp.array([offset]), frequencies))
        return (turned_q * turned_k).sum()

    np.testing.assert_allclose(product(shift), product(0), atol=1e-3)


def test_rms_norm_by_hand():
    # rms of (3, 4) is sqrt(12.5); eps 0.5 makes it sqrt(13).
    x, scale = jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0])
    expected = np.array([[3.0, 8.0]]) / np.sqrt(13.0)
    np.testing.assert_allclose(rms_norm(x, scale, 0.5), expected, rtol=1e-6)


def decoded(params, tokens, order):
    """Hidden states of whole rows, made in passes of (rows, positions)."""
    rows, length = tokens.shape
    cache = empty_cache(ARCH, rows, length)
    found = np.zeros((rows, length, ARCH.hidden_size), np.float32)
    for at in order:
        hidden, cache = decode(
            params, ARCH, jnp.asarray(tokens[at]), cache, at[1], at[0]
        )
        found[at] = hidden
    return found


def test_one_token_at_a_time_is_the_whole_row(params):
    whole = forward_rows(params, ARCH, LOOSE_ROWS)
    rows, length = LOOSE_ROWS.shape
    order = [(np.arange(rows), np.full(rows, position)) for position in range(length)]
    np.testing.assert_allclose(decoded(params, LOOSE_ROWS, order), whole, atol=1e-5)


def test_any_cut_into_passes_is_the_whole_row(params):
    whole = forward_rows(params, ARCH, LOOSE_ROWS)
    order = [
        # 4 tokens of row 0 and 2 of row 2; then row 1 as a whole and the rest.
        (np.array([0, 0, 0, 0, 2, 2]), np.array([0, 1, 2, 3, 0, 1])),
        (np.array([1] * 9), np.arange(9)),
        (np.array([2] * 7 + [0] * 5), np.array([*range(2, 9), *range(4, 9)])),
    ]
    np.testing.assert_allclose(decoded(params, LOOSE_ROWS, order), whole, atol=1e-5)


def test_what_attention_returns_is_all_that_a_token_knows_of_others(params):
    tokens, positions = jnp.asarray(LOOSE_ROWS[0]), jnp.arange(9)
    seen = []

    def attend(layer, q, k, v):
        seen.append((layer, q.shape, k.shape, v.shape))
        return jnp.zeros_like(q)

    layered = unstack_layers(params, ARCH)
    options = dict(positions=positions, attend=attend, dtype=jnp.float32)
    together, said = cached_hidden(layered, ARCH, tokens, **options)
    heads, keys = (9, ARCH.num_heads, ARCH.head_dim), (9, ARCH.num_kv_heads, 8)
    assert seen == [(layer, heads, keys, keys) for layer in range(ARCH.num_layers)]
    assert not said
    backwards, _ = cached_hidden(
        layered, ARCH, tokens[::-1], **options | {"positions": positions[::-1]}
    )
    np.testing.assert_allclose(together, backwards[::-1], atol=1e-6)


def test_layers_taken_apart_are_the_layers_of_the_stack(params):
    layered = unstack_layers(params, ARCH)
    assert len(layered["layers"]) == ARCH.num_layers
    for index, layer in enumerate(layered["layers"]):
        for name, leaf in layer.items():
            np.testing.assert_array_equal(leaf, params["layers"][name][index])
    rest = {name: leaf for name, leaf in params.items() if name != "layers"}
    assert all(layered[name] is leaf for name, leaf in rest.items())


def test_segments_of_a_packed_row_do_not_see_each_other(params):
    lengths = (4, 7, 5)
    pieces = [row[:n] for row, n in zip(LOOSE_ROWS, lengths, strict=True)]
    tokens = np.concatenate([*pieces, [0, 0]])[None]
    positions = np.concatenate([*map(np.arange, lengths), [0, 1]])[None]
    segment_ids = np.repeat([1, 2, 3, 0], [*lengths, 2])[None]
    packed = forward(params, ARCH, tokens, positions, segment_ids)
    rows = forward_rows(params, ARCH, LOOSE_ROWS)  # later tokens are not seen
    separate = [row[:n] for row, n in zip(rows, lengths, strict=True)]
    np.testing.assert_allclose(
        packed[0, : sum(lengths)], np.concatenate(separate), atol=1e-5
    )
    assert np.isfinite(packed).all()


def test_later_tokens_do_not_change_earlier_ones(params):
    changed = LOOSE_ROWS.copy()
    changed[:, 5:] = (changed[:, 5:] + 1) % ARCH.vocab_size
    before = forward_rows(params, ARCH, LOOSE_ROWS)
    after = forward_rows(params, ARCH, changed)
    np.testing.assert_allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert np.abs(before[:, 5:] - after[:, 5:]).max() > 0.1


@pytest.mark.parametrize("remat", sorted(set(REMAT) - {"none"}))
def test_remat_does_not_change_the_gradient(params, remat):
    arch = dataclasses.replace(ARCH, num_layers=1)
    layer = params | {"layers": jax.tree.map(lambda x: x[:1], params["layers"])}

    @jax.jit
    def difference(params):
        def gradient(remat):
            def loss(params):
                hidden = forward_rows(params, arch, LOOSE_ROWS, remat=remat)
                return (hidden**2).sum()

            return jax.grad(loss)(params)

        return jax.tree.map(jnp.subtract, gradient(remat), gradient("none"))

    for leaf in jax.tree.leaves(difference(layer)):
        np.testing.assert_allclose(leaf, 0.0, atol=1e-4)


@pytest.mark.parametrize(
    "remat, again", [("none", 0), ("dots", 0), ("attention", 6), ("full", 6)]
)
def test_products_with_weights_that_the_backward_pass_makes_anew(params, remat, again):
    def loss(params):
        return forward_rows(params, ARCH, LOOSE_ROWS, remat=remat).sum()

    # Attention's have batch dimensions.  Nobody needs the last of a layer again.
    products = str(jax.make_jaxpr(jax.grad(loss))(params)).count("([], []))")
    assert products == 3 * 7 + again


def test_the_float32_head_keeps_what_bfloat16_would_round():
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(4, 64)), jnp.bfloat16)
    head = jnp.asarray(rng.normal(size=(16, 64)), jnp.bfloat16)
    exact = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
    kept = head_logits(hidden, head, float32_head=True)
    rounded = head_logits(hidden, head, float32_head=False)
    assert kept.dtype == rounded.dtype == jnp.float32
    np.testing.assert_allclose(kept, exact, atol=1e-5)
    assert np.abs(rounded - exact).max() > 1e-3


def test_abstract_parameters_describe_the_real_ones(params):
    abstract = abstract_params(ARCH, dtype=jnp.dtype("float32"))
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), abstract)
    assert described == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)


@pytest.mark.parametrize(
    "arch, shape",
    [
        (ARCH, (2, 2, 1, 2)),
        (ARCH, (1, 2, 2, 2)),
        (small_architecture(family="olmo3", windows=(3, 0)), (1, 2, 2, 2)),
        (
            small_architecture(
                family="gemma3_text", windows=(0, 4), window_rope=Rope(50.0)
            ),
            (2, 2, 1, 2),
        ),
    ],
    ids=["qwen3", "qwen3 over context", "olmo3 over context", "gemma3"],
)
def test_eight_devices_compute_what_one_does(random_params, arch, shape):
    params = random_params(arch)
    mesh = mesh_of(shape)
    tokens = np.random.default_rng(0).integers(0, arch.vocab_size, (4, 10))
    positions = np.broadcast_to(np.arange(10), tokens.shape)
    segment_ids = np.where(np.arange(10) < 5, 1, 2) * np.ones_like(tokens)
    one = forward(params, arch, tokens, positions, segment_ids)

    def over_mesh(params, tokens, positions, segment_ids):
        return hidden_states(
            params,
            arch,
            tokens,
            positions=positions,
            segment_ids=segment_ids,
            dtype=jnp.float32,
            attention=BlockwiseAttention(mesh, block=2),
            mesh=mesh,
        )[0]

    rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), "context"))
    sharded = jax.jit(
        over_mesh, in_shardings=(param_shardings(arch, mesh), rows, rows, rows)
    )
    eight = sharded(params, tokens, positions, segment_ids)
    np.testing.assert_allclose(eight, one, atol=1e-5)
    # Rows and tokens stay where they are; hidden units are whole.
    share = (4 // (shape[0] * shape[1]), 10 // shape[2], arch.hidden_size)
    assert eight.addressable_shards[0].data.shape == share
