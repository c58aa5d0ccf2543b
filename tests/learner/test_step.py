"""The train step against a slow loss, and all that it must not depend on.

Differences between layouts are rounding only, so they are compared after a step of
plain gradient descent at rate 1, where the params show the gradient itself.  Adam
would hide a wrong scale (its step has the length of the rate, whatever the gradient)
and magnify rounding (an entry whose gradient is 1e-9 of noise moves the whole rate).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_step import (
    ADAMW,
    ARCH,
    CAP,
    LONGEST,
    WEIGHTINGS,
    RatedSequence,
    assert_trees_close,
    assert_trees_equal,
    bench,
    make_sequences,
    of_trained_tokens,
    sampled_logprobs,
    slow_result,
    start_params,
)

from scalerl_jax.learner.step import (
    Accumulated,
    init_state,
    make_update,
    unfit_update,
)
from scalerl_jax.model.transformer import (
    REMAT,
    head_logits,
    head_weights,
    hidden_states,
)

# Gradients here are sums of some 60 float32 terms of size 0.01 to 1: their rounding
# is about 1e-6; a lost token or a wrong mean would show as 1e-2.
CLOSE = dict(rtol=1e-5, atol=3e-6)
ONE_ROW_EACH = dict(rows=8, row_tokens=LONGEST)
FEW_ROWS = dict(rows=2, row_tokens=24)
SHORT_ROWS = dict(rows=3, row_tokens=13)
MOSTLY_PADDING = dict(rows=4, row_tokens=36)


def assert_step_of_slow_loss(bench, aggregation="prompt", **options):
    state, metrics = bench.run(aggregation=aggregation, **options)
    loss, gradient, after = slow_result(aggregation)
    norm = optax.tree.norm(gradient)
    assert norm > 0.05
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert_trees_close(state.params, after, **CLOSE)
    assert state.policy_version == 1
    assert not metrics["skipped"]


@pytest.mark.parametrize("aggregation", WEIGHTINGS)
@pytest.mark.parametrize(
    "layout, packing, microbatches",
    [
        pytest.param(ONE_ROW_EACH, False, 1, id="not packed, one microbatch"),
        pytest.param(SHORT_ROWS, False, 3, id="not packed, three microbatches"),
        pytest.param(SHORT_ROWS, True, 2, id="packed, two microbatches"),
        pytest.param(FEW_ROWS, True, 2, id="packed, two microbatches of two rows"),
        pytest.param(MOSTLY_PADDING, True, 1, id="packed, mostly padding"),
    ],
)
def test_the_step_takes_the_gradient_of_the_slow_loss(
    layout, packing, microbatches, aggregation
):
    these = bench(**layout)
    assert len(these.batch(packing=packing).tokens) == microbatches
    assert_step_of_slow_loss(these, aggregation, packing=packing)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 1, 1, 1), id="one device"),
        pytest.param((1, 2, 1, 2), id="rows and heads apart", marks=pytest.mark.slow),
        pytest.param((2, 1, 1, 1, 1, 2), id="two slices", marks=pytest.mark.slow),
    ],
)
def test_short_rows_of_the_last_microbatch_change_nothing(shape):
    these = bench(shape=shape, **FEW_ROWS, short_rows=(6, 12, 18))
    batch = these.batch()
    assert batch.row_ends.tolist() == [24, 6]
    read = [each.tokens.shape for each in these.step.microbatches(batch)]
    assert read == [(2, 24), (2, 6)]
    for aggregation in WEIGHTINGS:
        assert_step_of_slow_loss(these, aggregation)
    # A batch of whole rows, and none with a last microbatch, is as before.
    assert_step_of_slow_loss(these, packing=False)


@settings(deadline=None, max_examples=8)
@given(order=st.permutations(range(8)), packing=st.booleans())
def test_which_rollouts_share_a_row_changes_nothing(order, packing):
    sequences = tuple(make_sequences()[place] for place in order)
    # Equal lengths stay in the order that they came in: so may rows differ.
    assert_step_of_slow_loss(bench(**SHORT_ROWS), sequences=sequences, packing=packing)


@pytest.mark.parametrize("remat", sorted(set(REMAT) - {"none"}))
def test_what_the_backward_pass_computes_anew_changes_nothing(remat):
    tiles = dict(block=4, chunk_tokens=9, chunk_vocab=8)
    assert_step_of_slow_loss(bench(**FEW_ROWS, remat=remat, **tiles))


# data, fsdp, context, tensor, parts of experts, slices; rows are cut into data * fsdp,
# their tokens by context
@pytest.mark.parametrize(
    "shape, layout",
    [
        pytest.param(
            (1, 8, 1, 1), dict(rows=8, row_tokens=13), id="fsdp", marks=pytest.mark.slow
        ),
        pytest.param(
            (1, 1, 8, 1),
            dict(rows=1, row_tokens=24),
            id="context",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (4, 1, 1, 2),
            dict(rows=4, row_tokens=13),
            id="data and tensor",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (2, 2, 1, 2),
            dict(rows=4, row_tokens=36),
            id="without context",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (1, 2, 2, 2),
            dict(rows=2, row_tokens=24),
            id="without data",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (4, 1, 1, 2, 1, 4),
            dict(rows=4, row_tokens=13),
            id="four slices",
            marks=pytest.mark.slow,
        ),
        pytest.param((2, 2, 2, 1, 1, 2), dict(rows=4, row_tokens=16), id="two slices"),
        pytest.param(
            (2, 2, 2, 1),
            dict(rows=4, row_tokens=16),
            id="without tensor",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_any_mesh_takes_the_gradient_of_the_slow_loss(shape, layout):
    these = bench(shape=shape, block=3, chunk_tokens=5, chunk_vocab=4, **layout)
    for aggregation in WEIGHTINGS:
        assert_step_of_slow_loss(these, aggregation)


def test_the_metrics_are_those_of_the_whole_batch():
    _, metrics = bench(**SHORT_ROWS).run(packing=False)
    behavior = np.concatenate(of_trained_tokens("behavior_logprobs"))
    logprobs = np.concatenate(jax.jit(sampled_logprobs)(start_params()))
    difference = logprobs - behavior
    fresh = np.concatenate(of_trained_tokens("staleness")) == 0
    ratio = np.exp(difference)
    assert 0 < (ratio > CAP).sum() < len(ratio)  # both sides of the cap
    assert 0 < fresh.sum() < len(fresh)
    expected = {
        "ratio/mean": ratio.mean(),
        "ratio/max": ratio.max(),
        "ratio/capped_share": (ratio > CAP).mean(),
        "mismatch/tokens": fresh.sum(),
        "mismatch/mean_abs": np.abs(difference[fresh]).mean(),
        "mismatch/max_abs": np.abs(difference[fresh]).max(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_rewarded_token_gets_likelier_and_a_punished_one_does_not(sign):
    sequence = RatedSequence(
        tokens=np.array([3, 7, 5], np.int32),
        prompt_length=2,
        weights=np.ones(1, np.float32),
        mask=np.ones(1, bool),
        behavior_logprobs=np.full(1, -2.0, np.float32),
        staleness=np.zeros(1, np.int32),
        advantage=sign * 0.01,
    )
    after, _ = bench(**FEW_ROWS).run(sequences=[sequence])

    def logprob(params):
        hidden, _ = hidden_states(
            params,
            ARCH,
            jnp.array([[3, 7]]),
            positions=jnp.array([[0, 1]]),
            segment_ids=jnp.ones((1, 2), int),
            dtype=jnp.float32,
        )
        logits = head_logits(hidden[0, -1], head_weights(params), float32_head=True)
        return jax.nn.log_softmax(logits)[5]

    before = jax.tree.map(jnp.asarray, start_params())
    assert np.sign(logprob(after.params) - logprob(before)) == sign


def wild(batch, *, seed):
    """The same batch with absurd values wherever nothing is trained on."""
    rng = np.random.default_rng(seed)
    shape, off, padding = batch.mask.shape, ~batch.mask, batch.segment_ids == 0
    huge = rng.choice(np.array([1e30, -1e30, 7.0], np.float32), shape)
    ids = rng.integers(0, ARCH.vocab_size, shape, np.int32)
    positions = rng.integers(0, 2**31 - 1, shape, np.int32)
    nonsense = rng.choice(np.array([np.nan, np.inf, -np.inf, 1e30], np.float32), shape)
    return batch.replace(
        tokens=np.where(padding, ids, batch.tokens),
        positions=np.where(padding, positions, batch.positions),
        targets=np.where(off, ids, batch.targets),
        weights=np.where(off, huge, batch.weights),
        advantages=np.where(off, huge[::-1], batch.advantages),
        behavior_logprobs=np.where(off, nonsense, batch.behavior_logprobs),
        staleness=np.where(off, ids, batch.staleness),
    )


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 2**32 - 1))
def test_wild_values_in_the_padding_change_nothing(seed):
    these = bench(**MOSTLY_PADDING)
    batch = these.batch()
    assert (batch.segment_ids == 0).mean() > 0.4
    assert_trees_equal(these.run(wild(batch, seed=seed)), these.run(batch))


@pytest.mark.parametrize(
    "field, value",
    [
        pytest.param("advantages", np.inf, id="an infinite advantage"),
        pytest.param("behavior_logprobs", np.nan, id="a behavior logprob that is NaN"),
        pytest.param("weights", 3e38, id="a gradient whose norm overflows"),
    ],
)
def test_a_gradient_that_is_not_finite_leaves_the_state_as_it_was(field, value):
    these = bench(optimizer=ADAMW, **FEW_ROWS)
    batch = these.batch()
    spoiled = np.copy(getattr(batch, field))
    spoiled[tuple(np.argwhere(batch.mask)[0])] = value
    state, _ = these.run(batch)  # moments that are not zero
    before = jax.device_get(state)
    state, metrics = these.step(state, batch.replace(**{field: spoiled}))
    assert metrics["skipped"]
    assert_trees_equal(state, before)
    assert state.policy_version == 1
    # It goes on as if nothing had been.
    resumed, metrics = these.step(state, batch)
    assert not metrics["skipped"]
    state, _ = these.step(these.run(batch)[0], batch)
    assert_trees_equal(resumed, state)


def scalars(dtype, **values):
    return {name: jnp.full(3, value, dtype) for name, value in values.items()}


@pytest.mark.parametrize(
    "optimizer, dtype, rounding, gradient, words",
    [
        pytest.param(optax.sgd(1e30), "float32", False, 1e10, "params.b", id="1e40"),
        # 3.4e38 is a float32; the largest bfloat16 is 3.39e38.
        pytest.param(
            optax.sgd(1e20), "float32", False, -3.4e18, "params.b", id="when published"
        ),
        pytest.param(
            optax.sgd(1e20), "bfloat16", False, -3.4e18, "params.b", id="when rounded"
        ),
        pytest.param(
            optax.sgd(1e20), "bfloat16", True, -3.4e18, "params.b", id="at random"
        ),
        # (1e5 * 1e15)^2 is past float32, and m / sqrt(inf) is 0.
        pytest.param(
            optax.chain(optax.scale(1e5), optax.adam(0.1)),
            "float32",
            False,
            1e15,
            "opt_state.1.0.nu.b",
            id="a moment alone",
        ),
    ],
)
def test_an_update_that_is_not_finite_is_undone(
    optimizer, dtype, rounding, gradient, words
):
    """By hand: the gradient of one of two params is large, and finite."""
    update = jax.jit(
        make_update(
            optimizer, stochastic_rounding=rounding, summarize=lambda sums, maxima: {}
        )
    )
    params = scalars(dtype, a=1.0, b=2.0)
    state = init_state(params, optimizer)

    def sums(of_b):
        grads = scalars("float32", a=0.0, b=of_b)
        return Accumulated(loss=jnp.float32(0.5), grads=grads, sums={}, maxima={})

    after, metrics = update(state, sums(gradient))
    assert np.isfinite(metrics["grad_norm"]) and metrics["skipped"]
    assert_trees_equal(after, state)
    assert unfit_update(after, int(metrics["unfit"])) == (
        f"the gradient is finite, but {words} would hold numbers that are NaN, "
        f"infinite or past the range of bfloat16"
    )
    after, metrics = update(state, sums(0.0))
    assert not metrics["skipped"] and metrics["unfit"] == -1
    assert after.policy_version == 1


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_gradient_is_compared_with_the_mean_of_those_before(clip):
    """By hand with b1 = 1/2: the mean is (3, 4) / 2, then (11, 10) / 4."""
    plain = optax.adam(0.1, b1=0.5)
    long = 3.0**0.5 * 5.0  # each number is there three times
    clipped = optax.chain(optax.clip_by_global_norm(long), plain)
    optimizer = clipped if clip else plain
    update = jax.jit(make_update(optimizer, summarize=lambda sums, maxima: {}))
    state = init_state(scalars("float32", a=1.0, b=2.0), optimizer)
    # The third is at right angles to the mean; the last one alone is longer than 5.
    for a, b, cosine in ((3, 4, 0), (4, 3, 0.96), (-1.0, 1.1, 0), (-5.5, -5, None)):
        grads = scalars("float32", a=a, b=b)
        sums = Accumulated(loss=jnp.float32(0.5), grads=grads, sums={}, maxima={})
        state, metrics = update(state, sums)
        if cosine is not None:
            np.testing.assert_allclose(metrics["grad_cosine"], cosine, atol=1e-6)
    # mean: (11, 10) / 8 + (-1, 1.1) / 2
    mean = np.array([11 / 8 - 0.5, 10 / 8 + 0.55])
    by_hand = mean @ [-5.5, -5] / np.linalg.norm(mean) / np.hypot(5.5, 5)
    np.testing.assert_allclose(metrics["grad_cosine"], by_hand, rtol=1e-6)


def test_plain_descent_has_no_mean_to_compare_with():
    state, metrics = bench().run()
    assert state.policy_version == 1 and "grad_cosine" not in metrics


def test_a_moment_that_was_not_finite_before_is_said_to_be_so():
    optimizer = optax.adam(0.1)
    state = init_state(scalars("float32", a=1.0), optimizer)
    adam, *rest = state.opt_state
    # The update is m / sqrt(inf) = 0: the params stay finite.
    adam = adam._replace(nu=scalars("float32", a=np.inf))
    state = state.replace(opt_state=(adam, *rest))
    grads = scalars("float32", a=0.1)
    after, metrics = jax.jit(make_update(optimizer, summarize=lambda *_: {}))(
        state, Accumulated(loss=jnp.float32(0.5), grads=grads, sums={}, maxima={})
    )
    assert metrics["skipped"]
    assert_trees_equal(after, state)
    said = unfit_update(after, int(metrics["unfit"]))
    assert said.startswith("opt_state.0.nu.a of the train state was not finite before")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_changes_no_bit_of_a_finite_step(dtype):
    """Against the optimizer alone, over three steps."""
    optimizer = ADAMW

    @jax.jit
    def unchecked(params, moments, grads):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        updates, moments = optimizer.update(grads, moments, wide)
        new = optax.apply_updates(wide, updates)
        return jax.tree.map(lambda x, old: x.astype(old.dtype), new, params), moments

    update = jax.jit(make_update(optimizer, summarize=lambda sums, maxima: {}))
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), start_params())
    state = init_state(params, optimizer)
    moments = state.opt_state
    rng = np.random.default_rng(2)
    for _ in range(3):
        grads = jax.tree.map(
            lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params
        )
        sums = Accumulated(loss=jnp.float32(0.5), grads=grads, sums={}, maxima={})
        state, metrics = update(state, sums)
        params, moments = unchecked(params, moments, grads)
        assert not metrics["skipped"]
        assert_trees_equal(state.params, params)
        assert_trees_equal(state.opt_state, moments)
