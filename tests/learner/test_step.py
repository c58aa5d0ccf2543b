"""The train step against a slow loss, and all that it must not depend on.

Differences between layouts are rounding only, so they are compared after a step of
plain gradient descent at rate 1, where the params show the gradient itself.  Adam
would hide a wrong scale (its step has the length of the rate, whatever the gradient)
and magnify rounding (an entry whose gradient is 1e-9 of noise moves the whole rate).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small_model import SMALL

from scalerl_jax.algo.losses import cispo_loss
from scalerl_jax.learner.optimizer import make_optimizer
from scalerl_jax.learner.step import (
    Forward,
    compile_train_step,
    init_state,
    make_train_step,
    state_shardings,
)
from scalerl_jax.model.shardings import batch_sharding, param_shardings
from scalerl_jax.model.transformer import (
    abstract_params,
    head_logits,
    head_weights,
    hidden_states,
)
from scalerl_jax.parallel.mesh import make_learner_mesh
from scalerl_jax.rollout.batching import TrainSequence, pack

ARCH = SMALL
CAP = 1.5
TEMPERATURE = 0.8
FAST_COMPILE = {"xla_backend_optimization_level": 0}  # halves the time of this file
LONGEST = 12  # positions of the longest sequence
# Gradients here are sums of some 60 float32 terms of size 0.01 to 1: their rounding
# is about 1e-6; a lost token or a wrong mean would show as 1e-2.
CLOSE = dict(rtol=1e-5, atol=3e-6)


@functools.cache
def start_params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(np.float32),
        abstract_params(ARCH, dtype=jnp.float32),
    )


@functools.cache
def make_sequences():
    """Nine rollouts of uneven lengths; some with forced tokens, some stale."""
    rng = np.random.default_rng(1)
    sequences = []
    for prompt, completion in [
        (1, 1), (3, 2), (2, 9), (5, 8), (1, 6), (4, 4), (6, 1), (2, 5), (3, 7)
    ]:  # fmt: skip
        mask = rng.random(completion) > 0.2
        mask[-1] = True
        sequences.append(
            TrainSequence(
                tokens=rng.integers(0, 16, prompt + completion).astype(np.int32),
                prompt_length=prompt,
                weights=np.where(mask, rng.random(completion), 0.0),
                mask=mask,
                behavior_logprobs=rng.uniform(-4.0, -2.0, completion),
                staleness=rng.integers(0, 2, completion),
                advantage=float(rng.normal()),
            )
        )
    total = sum(sequence.weights.sum() for sequence in sequences)
    return tuple(
        dataclasses.replace(sequence, weights=sequence.weights / total)
        for sequence in sequences
    )


def packed(*, row_tokens, rows, microbatches, packing=True):
    return pack(
        make_sequences(),
        row_tokens=row_tokens,
        rows_per_microbatch=rows,
        num_microbatches=microbatches,
        packing=packing,
    )


@functools.cache
def make_step(optimizer, *, remat="none", chunk_tokens=1024):
    forward = Forward(
        arch=ARCH,
        dtype=jnp.float32,
        remat=remat,
        chunk_tokens=chunk_tokens,
        temperature=TEMPERATURE,
    )
    return make_train_step(
        forward,
        optimizer,
        functools.partial(cispo_loss, max_importance_ratio=CAP),
        max_importance_ratio=CAP,
    )


PLAIN = optax.sgd(1.0)
ADAMW = make_optimizer(
    learning_rate=0.1,
    warmup_steps=4,
    beta1=0.9,
    beta2=0.95,
    eps=1e-2,  # far above the gradients' rounding: a step then moves no more than it
    weight_decay=0.1,
    max_grad_norm=1.0,
)


@functools.cache
def jitted_step(optimizer, **options):
    return jax.jit(make_step(optimizer, **options), compiler_options=FAST_COMPILE)


def plain_state():
    return init_state(start_params(), PLAIN)


def sampled_logprobs(params):
    """Of each trained token, in order, read from whole rows of logits."""
    sequences = make_sequences()
    tokens = np.zeros((len(sequences), LONGEST + 1), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence.tokens)] = sequence.tokens
    hidden = hidden_states(
        params,
        ARCH,
        tokens,
        positions=np.broadcast_to(np.arange(LONGEST + 1), tokens.shape),
        segment_ids=np.ones_like(tokens),
        dtype=jnp.float32,
    )
    logits = head_logits(hidden, head_weights(params), float32_head=True)
    every = jax.nn.log_softmax(logits / TEMPERATURE)
    found = []
    for row, sequence in enumerate(sequences):
        for place in np.flatnonzero(sequence.mask):
            seen = sequence.prompt_length + place  # tokens before the one predicted
            found.append(every[row, seen - 1, sequence.tokens[seen]])
    return jnp.stack(found)


def of_trained_tokens(name):
    """Values of one field, in the order of `sampled_logprobs`."""
    return np.concatenate(
        [getattr(sequence, name)[sequence.mask] for sequence in make_sequences()]
    )


def slow_loss(params):
    logprobs = sampled_logprobs(params)
    ratio = jnp.exp(logprobs - of_trained_tokens("behavior_logprobs"))
    capped = jax.lax.stop_gradient(jnp.minimum(ratio, CAP))
    advantages = np.concatenate(
        [np.full(each.mask.sum(), each.advantage) for each in make_sequences()]
    )
    return -(of_trained_tokens("weights") * capped * advantages * logprobs).sum()


@functools.cache
def slow_result():
    """Loss, gradient, and params after plain gradient descent at rate 1."""
    function = jax.jit(jax.value_and_grad(slow_loss), compiler_options=FAST_COMPILE)
    loss, gradient = function(start_params())
    after = jax.tree.map(lambda param, part: param - part, start_params(), gradient)
    return loss, gradient, after


def assert_trees_close(found, expected, **tolerance):
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, **tolerance),
        found,
        expected,
    )


def assert_trees_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


ONE_ROW_EACH = dict(row_tokens=LONGEST, rows=9, microbatches=1, packing=False)
ROW_BY_ROW = dict(row_tokens=25, rows=1, microbatches=6)
MOSTLY_PADDING = dict(row_tokens=17, rows=4, microbatches=3)
EIGHT_ROWS = dict(row_tokens=17, rows=8, microbatches=2)  # for meshes of 8


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ONE_ROW_EACH, id="not packed, one microbatch"),
        pytest.param(
            dict(row_tokens=LONGEST, rows=2, microbatches=5, packing=False),
            id="not packed, five microbatches",
        ),
        pytest.param(ROW_BY_ROW, id="row by row"),
        pytest.param(MOSTLY_PADDING, id="mostly padding"),
    ],
)
def test_the_step_takes_the_gradient_of_the_slow_loss(layout):
    state, metrics = jitted_step(PLAIN)(plain_state(), packed(**layout))
    loss, gradient, after = slow_result()
    norm = optax.tree.norm(gradient)
    assert norm > 0.1
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert_trees_close(state.params, after, **CLOSE)
    assert state.policy_version == 1
    assert not metrics["skipped"]


@pytest.mark.parametrize("options", [dict(remat="dots", chunk_tokens=9)], ids=str)
def test_what_the_backward_pass_computes_anew_changes_nothing(options):
    step = jitted_step(PLAIN, **options)
    state, _ = step(plain_state(), packed(**ONE_ROW_EACH))
    assert_trees_close(state.params, slow_result()[2], **CLOSE)


def test_the_metrics_are_those_of_the_whole_batch():
    batch = packed(**ROW_BY_ROW)
    _, metrics = jitted_step(PLAIN)(plain_state(), batch)
    difference = jax.jit(sampled_logprobs)(start_params()) - of_trained_tokens(
        "behavior_logprobs"
    )
    ratio, fresh = np.exp(difference), of_trained_tokens("staleness") == 0
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
    sequence = TrainSequence(
        tokens=np.array([3, 7, 5], np.int32),
        prompt_length=2,
        weights=np.ones(1, np.float32),
        mask=np.ones(1, bool),
        behavior_logprobs=np.full(1, -2.0, np.float32),
        staleness=np.zeros(1, np.int32),
        advantage=sign * 0.01,
    )
    batch = pack([sequence], row_tokens=25, rows_per_microbatch=1, num_microbatches=6)
    before = plain_state()
    after, _ = jitted_step(PLAIN)(before, batch)

    def logprob(params):
        hidden = hidden_states(
            params,
            ARCH,
            np.array([[3, 7]]),
            positions=np.array([[0, 1]]),
            segment_ids=np.ones((1, 2), int),
            dtype=jnp.float32,
        )
        logits = head_logits(hidden[0, -1], head_weights(params), float32_head=True)
        return jax.nn.log_softmax(logits)[5]

    assert np.sign(logprob(after.params) - logprob(before.params)) == sign


def wild(batch, *, seed):
    """The same batch with absurd values wherever nothing is trained on."""
    rng = np.random.default_rng(seed)
    shape, off, padding = batch.mask.shape, ~batch.mask, batch.segment_ids == 0
    huge = rng.choice(np.array([1e30, -1e30, 7.0], np.float32), shape)
    ids = rng.integers(0, ARCH.vocab_size, shape, np.int32)
    return batch.replace(
        tokens=np.where(padding, ids, batch.tokens),
        positions=np.where(padding, rng.integers(0, 2**31 - 1, shape), batch.positions),
        targets=np.where(off, ids, batch.targets),
        weights=np.where(off, huge, batch.weights),
        advantages=np.where(off, huge[::-1], batch.advantages),
        behavior_logprobs=np.where(
            off, rng.choice([np.nan, np.inf, -np.inf, 1e30], shape), batch.weights * 0
        )
        + np.where(off, 0, batch.behavior_logprobs),
        staleness=np.where(off, ids, batch.staleness),
    )


def test_wild_values_in_the_padding_change_nothing():
    batch = packed(**MOSTLY_PADDING)
    assert (batch.segment_ids == 0).mean() > 0.4
    step = jitted_step(PLAIN)
    expected = step(plain_state(), batch)
    assert_trees_equal(step(plain_state(), wild(batch, seed=0)), expected)


def test_microbatches_past_the_filled_ones_are_not_read():
    batch = packed(**ROW_BY_ROW)
    filled = int(batch.num_microbatches)
    assert filled < 6
    rubbish = jax.tree.map(np.copy, batch)
    rubbish.weights[filled:] = np.nan
    rubbish.mask[filled:] = True
    step = jitted_step(PLAIN)
    assert_trees_equal(step(plain_state(), rubbish), step(plain_state(), batch))


@pytest.mark.parametrize(
    "field, value",
    [
        pytest.param("advantages", np.inf, id="an infinite advantage"),
        pytest.param("behavior_logprobs", np.nan, id="a behavior logprob that is NaN"),
        pytest.param("weights", 3e38, id="a gradient whose norm overflows"),
    ],
)
def test_a_gradient_that_is_not_finite_leaves_the_state_as_it_was(field, value):
    batch = packed(**EIGHT_ROWS)
    spoiled = np.copy(getattr(batch, field))
    spoiled[tuple(np.argwhere(batch.mask)[0])] = value
    step = jitted_step(ADAMW)
    before, _ = step(init_state(start_params(), ADAMW), batch)  # moments not zero
    after, metrics = step(before, batch.replace(**{field: spoiled}))
    assert metrics["skipped"]
    assert_trees_equal(after, before)
    assert after.policy_version == 1
    # It goes on as if nothing had been.
    resumed, metrics = step(after, batch)
    assert not metrics["skipped"]
    assert_trees_equal(resumed, step(before, batch)[0])


@functools.cache
def two_steps_on_one_device():
    batch = packed(**EIGHT_ROWS)
    state, history = init_state(start_params(), ADAMW), []
    for _ in range(2):
        state, metrics = jitted_step(ADAMW)(state, batch)
        history.append(metrics)
    return state, history


@functools.cache
def laid_over(shape):
    """A mesh of the eight devices, shardings of the state, the compiled step."""
    mesh = make_learner_mesh(jax.devices(), *shape)
    shardings = state_shardings(
        jax.device_put(start_params(), param_shardings(ARCH, mesh)),
        ADAMW,
        everywhere=NamedSharding(mesh, PartitionSpec()),
    )
    step = compile_train_step(
        make_step(ADAMW), state_sharding=shardings, batch_sharding=batch_sharding(mesh)
    )
    return mesh, shardings, step


def on_mesh(shape):
    """A fresh state, a batch and the step of a mesh."""
    mesh, shardings, step = laid_over(shape)
    state = jax.device_put(init_state(start_params(), ADAMW), shardings)
    batch = jax.device_put(packed(**EIGHT_ROWS), batch_sharding(mesh))
    return state, batch, step


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 4, 2)], ids=str)
def test_eight_devices_make_the_params_of_one(shape):
    state, batch, step = on_mesh(shape)
    layout = jax.tree.map(lambda leaf: leaf.sharding, state)
    expected, history = two_steps_on_one_device()
    for expected_metrics in history:
        state, metrics = step(state, batch)
        assert_trees_close(metrics, expected_metrics, rtol=2e-5, atol=1e-6)
    # A step of Adam is at most rate / eps = 10 times as far off as its gradient.
    assert_trees_close(state, expected, rtol=1e-5, atol=2e-5)
    assert layout == jax.tree.map(lambda leaf: leaf.sharding, state)


def test_moments_are_cut_as_their_params_are():
    _, shardings, _ = laid_over((1, 4, 2))
    for moment in ("mu", "nu"):
        assert optax.tree.get(shardings.opt_state, moment) == shardings.params
    state, _, _ = on_mesh((1, 4, 2))
    first = optax.tree.get(state.opt_state, "mu")["embedding"]
    # vocabulary 16 over tensor 2, hidden 16 over fsdp 4
    assert first.addressable_shards[0].data.shape == (8, 4)


def test_the_compiled_step_deletes_the_state_that_it_was_given():
    state, batch, step = on_mesh((8, 1, 1))
    after, _ = step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))
