"""The train step's programs: what they delete, when they compile, in which numbers."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_step import (
    ADAMW,
    ARCH,
    CISPO,
    assert_trees_close,
    assert_trees_equal,
    bench,
    slow_result,
    start_params,
)

from scalerl_jax.learner.step import init_state, make_accumulate, make_update
from scalerl_jax.model.architecture import param_shardings
from scalerl_jax.preflight import hlo
from scalerl_jax.preflight.collectives import traffic

EIGHT = dict(optimizer=ADAMW, shape=(1, 4, 1, 2), rows=4, row_tokens=16)


def layout(state):
    return jax.tree.map(lambda leaf: leaf.sharding, state)


@pytest.mark.slow
def test_two_steps_of_adam_on_eight_devices_are_those_of_one():
    eight, one = bench(**EIGHT), bench(optimizer=ADAMW)
    ours, theirs = eight.state(), one.state()
    before = layout(ours)
    for _ in range(2):
        ours, metrics = eight.step(ours, eight.batch())
        theirs, expected = one.step(theirs, one.batch())
        assert_trees_close(metrics, expected, rtol=2e-5, atol=1e-6)
    # A step of Adam is at most rate / eps = 10 times as far off as its gradient.
    assert_trees_close(ours, theirs, rtol=1e-5, atol=2e-5)
    assert layout(ours) == before


def test_moments_are_cut_as_their_params_are():
    state = bench(**EIGHT).state()
    shardings = layout(state)
    assert shardings.params == param_shardings(ARCH, state.policy_version.sharding.mesh)
    for moment in ("mu", "nu"):
        assert optax.tree.get(shardings.opt_state, moment) == shardings.params
    first = optax.tree.get(state.opt_state, "mu")["embedding"]
    # vocabulary 16 over tensor 2, hidden 16 over fsdp 4
    assert first.addressable_shards[0].data.shape == (8, 4)


def test_between_slices_go_the_shards_of_the_gradient_alone_once_a_step():
    """Two slices of two shards, whose heads are cut in two: a device has 1/4 of it."""
    these = bench(optimizer=ADAMW, shape=(2, 2, 1, 2, 1, 2), rows=4, row_tokens=16)
    sent = {
        name: traffic(
            hlo.parse(program.compile().as_text()), num_devices=8, num_slices=2
        )
        for name, program in these.step.lower().items()
    }
    far = {
        name: sum(each.dcn_bytes for each in found.values())
        for name, found in sent.items()
    }
    params = these.state().params
    gradient = sum(
        4 * np.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(params)
    )
    metrics = 4 * 20  # the loss, and sums and maxima of tokens
    assert [*far] == ["start", "accumulate", "combine", "update"]
    assert far["start"] == far["accumulate"] == far["update"] == 0
    assert gradient < far["combine"] < gradient + metrics
    assert sum(each.sent_bytes for each in sent["combine"].values()) == 0
    assert sum(each.sent_bytes for each in sent["accumulate"].values()) > gradient


def test_a_step_deletes_the_state_that_it_was_given_and_nothing_else():
    these = bench(**EIGHT)
    state, batch = these.state(), these.batch()
    kept = jax.tree.map(np.copy, batch)
    after, _ = these.step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))
    jax.tree.map(np.testing.assert_array_equal, batch, kept)


@pytest.mark.usefixtures("no_program_cache")
def test_nothing_is_compiled_after_the_start_however_many_microbatches(caplog):
    tokens = EIGHT["row_tokens"]
    quarters = tuple(tokens * part // 4 for part in (1, 2, 3))
    these = bench(**EIGHT, short_rows=quarters)
    these.step.compile()
    state, batch = these.state(), these.batch(packing=False)
    ends = (tokens, *quarters)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for count, end in zip((1, 2, 1, 1), ends, strict=True):
            some = jax.tree.map(lambda leaf, count=count: leaf[:count], batch)
            row_ends = np.append(some.row_ends[:-1], end)
            some = dataclasses.replace(some, row_ends=row_ends)
            state, metrics = these.step(state, some)
            float(metrics["loss"])
        assert not [each for each in caplog.messages if "ompil" in each]
        jax.block_until_ready(jax.jit(lambda x: x + 41)(1.0))
        assert [each for each in caplog.messages if "ompil" in each]  # would be seen


def test_what_is_lowered_is_what_a_run_compiles():
    these = bench(**EIGHT, short_rows=(8, 16))
    shapes = {
        name: program.in_avals[0][2].segment_ids.shape
        for name, program in these.step.lower().items()
        if name.startswith("accumulate")
    }
    rows, tokens = EIGHT["rows"], EIGHT["row_tokens"]
    assert shapes == {
        "accumulate": (rows, tokens),
        "accumulate_8": (rows, 8),
        "accumulate_16": (rows, 16),
    }
    assert {"start", "update", *shapes} == these.step.lower().keys()


def moved(state):
    """How far params went from the start, as one float64 vector."""
    parts = jax.tree.map(
        lambda new, old: np.ravel(np.asarray(new, np.float64) - old),
        jax.device_get(state.params),
        start_params(),
    )
    return np.concatenate(jax.tree.leaves(parts))


def dtypes(tree):
    return {leaf.dtype for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), pytest.param((1, 2, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_a_bfloat16_forward_pass_moves_float32_params_nearly_as_float32_does(shape):
    state, _ = bench(shape=shape, compute_dtype="bfloat16").run()
    assert dtypes(state.params) == {jnp.dtype("float32")}
    expected = np.concatenate([np.ravel(x) for x in jax.tree.leaves(slow_result()[1])])
    error = np.linalg.norm(moved(state) + expected) / np.linalg.norm(expected)
    # bfloat16 rounds by up to 2^-8 = 0.004, here some twenty times in a row.
    assert 1e-4 < error < 0.03


@pytest.mark.slow
def test_gradients_of_float32_params_keep_more_bits_than_bfloat16_has():
    these = bench(compute_dtype="bfloat16")
    accumulate = make_accumulate(these.forward, CISPO)
    batch = jax.tree.map(lambda leaf: leaf[0], these.batch())
    run = jax.jit(accumulate)
    grads = run(start_params(), None, batch).grads
    for name in ("query", "value", "output", "gate", "down"):
        gradient = np.asarray(grads["layers"][name])
        assert gradient.dtype == np.float32
        assert np.mean(gradient == gradient.astype(jnp.bfloat16)) < 0.1, name


@pytest.mark.slow
def test_the_optimizer_of_bfloat16_params_counts_in_float32():
    these = bench(optimizer=ADAMW, compute_dtype="bfloat16", param_dtype="bfloat16")
    state, _ = these.run()
    assert dtypes(state.params) == {jnp.dtype("bfloat16")}
    for moment in ("mu", "nu"):
        assert dtypes(optax.tree.get(state.opt_state, moment)) == {jnp.dtype("float32")}
    again, _ = these.step(state, these.batch())
    assert dtypes(again.params) == {jnp.dtype("bfloat16")}
    assert again.policy_version == 2


def constant(rate):
    """An optimizer that subtracts `rate`, whatever the gradient."""
    return optax.stateless(
        lambda grads, params: jax.tree.map(
            lambda leaf: jnp.full_like(leaf, -rate), grads
        )
    )


NUDGE = constant(1e-4)  # below half a unit of every bfloat16 above 0.06


def test_params_are_rounded_to_nearest_unless_asked_otherwise():
    these = bench(optimizer=NUDGE, param_dtype="bfloat16")
    before = jax.device_get(these.state().params)
    after = jax.device_get(these.run()[0].params)

    def nearest(old, new):
        wanted = (old.astype(np.float32) - np.float32(1e-4)).astype(jnp.bfloat16)
        np.testing.assert_array_equal(new, wanted)

    jax.tree.map(nearest, before, after)


@pytest.mark.slow
def test_stochastic_rounding_moves_bfloat16_params_by_the_update_on_average():
    these = bench(optimizer=NUDGE, param_dtype="bfloat16", stochastic_rounding=True)
    state = these.state()
    before = jax.device_get(state.params)
    steps = 40
    for _ in range(steps):
        state, _ = these.step(state, these.batch())
    total, spread = 0.0, 0.0
    for old, new in zip(
        jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True
    ):
        old, new = np.asarray(old, np.float64), np.asarray(new, np.float64)
        total += (new - old).sum()
        # A step to the next value, of at most 2^-8 of it, with odds of rate / step:
        # variance at most rate * step each time.
        spread += steps * (1e-4 * 2.0**-7 * np.abs(old)).sum()
    count = sum(leaf.size for leaf in jax.tree.leaves(before))
    assert abs(total + steps * 1e-4 * count) < 5 * spread**0.5


@pytest.mark.slow
def test_the_reference_stays_and_is_refreshed_when_it_is_due():
    these = bench(optimizer=ADAMW)
    params = jax.tree.map(jnp.asarray, start_params())
    state = init_state(params, ADAMW, with_reference=True)
    update = jax.jit(make_update(ADAMW, reference_every=2))
    sums = these.step.total(these.state().params, these.batch())
    first, _ = update(state, sums)
    assert_trees_equal(first.reference, start_params())
    second, _ = update(first, sums)
    # The compiler may compute the two apart, and round them apart.
    assert_trees_close(second.reference, second.params, rtol=0, atol=1e-6)
    third, _ = update(second, sums)
    assert_trees_equal(third.reference, second.reference)
    # A step that is skipped is none.
    broken, metrics = update(first, sums.replace(loss=jnp.float32(jnp.nan)))
    assert metrics["skipped"]
    assert_trees_equal(broken.reference, start_params())
