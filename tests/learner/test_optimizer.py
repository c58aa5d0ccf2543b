"""AdamW against torch and by hand; what it leaves alone, and how it rounds."""

import math

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
    CISPO,
    PLAIN,
    Bench,
    assert_trees_close,
    mesh_of,
    slow_result,
    start_params,
)

from scalerl_jax.learner.optimizer import (
    freeze,
    frozen_params,
    make_optimizer,
    make_schedule,
    round_stochastically,
    scaled_rate,
)
from scalerl_jax.learner.step import TrainStep, make_accumulate, make_update
from scalerl_jax.model.architecture import param_shardings

RATE, WARMUP, DECAY = 0.1, 4, 0.3
BETAS = (0.9, 0.95)


def optimizer(*, warmup_steps=WARMUP, decay_steps=0, **changes):
    schedule = make_schedule(
        learning_rate=RATE, warmup_steps=warmup_steps, decay_steps=decay_steps
    )
    settings = dict(
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=1e-15,
        weight_decay=DECAY,
        max_grad_norm=1.0,
    )
    return make_optimizer(schedule, **(settings | changes))


def run(transform, params, gradients):
    """Params after each of the gradients."""
    state = transform.init(params)
    update = jax.jit(transform.update)
    history = []
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return history


def run_torch(params, gradients, *, max_grad_norm, eps):
    """The same in float64: torch's AdamW, the warm-up and the clip written out."""
    torch = pytest.importorskip("torch")
    variables = {
        name: torch.tensor(np.asarray(value, np.float64), requires_grad=True)
        for name, value in params.items()
    }
    adamw = torch.optim.AdamW(
        variables.values(), lr=RATE, betas=BETAS, eps=eps, weight_decay=DECAY
    )
    history = []
    for step, gradient in enumerate(gradients, 1):
        norm = math.sqrt(
            sum((np.asarray(g, np.float64) ** 2).sum() for g in gradient.values())
        )
        scale = min(1.0, max_grad_norm / norm) if max_grad_norm else 1.0
        for name, variable in variables.items():
            variable.grad = torch.tensor(scale * np.asarray(gradient[name], np.float64))
        adamw.param_groups[0]["lr"] = RATE * min(1.0, step / WARMUP)
        adamw.step()
        history.append({k: v.detach().numpy().copy() for k, v in variables.items()})
    return history


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("eps", [1e-15, 1e-3])
def test_the_first_steps_are_those_of_torch(max_grad_norm, eps):
    rng = np.random.default_rng(0)

    def tree(scale):
        return {
            "matrix": (scale * rng.normal(size=(3, 4))).astype(np.float32),
            "vector": (scale * rng.normal(size=5)).astype(np.float32),
        }

    params = tree(1.0)
    # Norms from 0.04 to 400: both sides of the clip, during and after the warm-up.
    gradients = [tree(scale) for scale in (0.1, 100.0, 1.0, 0.01, 10.0, 0.1, 1.0)]
    found = run(optimizer(max_grad_norm=max_grad_norm, eps=eps), params, gradients)
    expected = run_torch(params, gradients, max_grad_norm=max_grad_norm, eps=eps)
    for ours, theirs in zip(found, expected, strict=True):
        for name in params:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=2e-6)


def test_the_first_step_by_hand():
    # Bias-corrected, the first moments are g and g^2: a step of the sign of g.
    (after,) = run(optimizer(), jnp.array([2.0, -1.0]), [jnp.array([0.3, -0.4])])
    first_rate = RATE / WARMUP
    by_hand = [
        2.0 - first_rate * (1.0 + DECAY * 2.0),
        -1.0 - first_rate * (-1.0 - DECAY * 1.0),
    ]
    np.testing.assert_allclose(after, by_hand, rtol=1e-6)


@pytest.mark.parametrize("warmup_steps", [0, 1, 4])
def test_step_n_of_the_warm_up_runs_at_n_parts(warmup_steps):
    # A constant gradient makes every step of Adam as long as its rate.
    transform = optimizer(warmup_steps=warmup_steps, weight_decay=0.0)
    history = run(transform, jnp.zeros(1), [jnp.ones(1)] * 6)
    lengths = -np.diff([0.0, *(float(params[0]) for params in history)])
    expected = [RATE * min(1.0, n / max(warmup_steps, 1)) for n in range(1, 7)]
    np.testing.assert_allclose(lengths, expected, rtol=1e-4)


def test_the_cosine_ends_at_nothing():
    transform = optimizer(warmup_steps=0, weight_decay=0.0, decay_steps=4)
    history = run(transform, jnp.zeros(1), [jnp.ones(1)] * 6)
    lengths = -np.diff([0.0, *(float(params[0]) for params in history)])
    half = math.sqrt(0.5)
    shares = [1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0, 0.0]
    np.testing.assert_allclose(lengths, RATE * np.array(shares), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "warmup_steps, decay_steps, final_share, shares",
    [
        pytest.param(0, 0, 0.0, [1, 1, 1, 1, 1], id="constant"),
        pytest.param(1, 0, 0.0, [1, 1, 1, 1, 1], id="a warm-up of one step"),
        pytest.param(4, 0, 0.0, [0.25, 0.5, 0.75, 1, 1], id="warm-up"),
        # (1 + cos) / 2 at 0, 45, 90, 135 and 180 degrees, of what is above a fifth.
        pytest.param(
            0, 4, 0.2, [1, 0.8828427, 0.6, 0.3171573, 0.2, 0.2], id="cosine to a fifth"
        ),
        pytest.param(2, 2, 0.0, [0.5, 0.5, 0, 0], id="warm-up times cosine"),
    ],
)
def test_the_rate_of_each_step_by_hand(warmup_steps, decay_steps, final_share, shares):
    schedule = make_schedule(
        learning_rate=RATE,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        final_share=final_share,
    )
    rates = [float(schedule(count)) for count in range(len(shares))]
    np.testing.assert_allclose(rates, RATE * np.array(shares), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "rollouts, expected",
    [(1024, 1e-6), (4096, 2e-6), (256, 5e-7), (8192, 2.8284271e-6)],
)
def test_isocomputes_rate_goes_by_the_root_of_the_batch(rollouts, expected):
    rate = scaled_rate(1e-6, rollouts=rollouts, base_rollouts=1024)
    assert rate == pytest.approx(expected, rel=1e-7)


def test_the_clip_is_of_the_norm_of_all_params_together():
    # Both leaves shrink by 1 / 5, the norm of (3, 4); sgd-like first moments show it.
    transform = optimizer(max_grad_norm=1.0, weight_decay=0.0)
    state = transform.init({"a": jnp.zeros(1), "b": jnp.zeros(1)})
    gradient = {"a": jnp.array([3.0]), "b": jnp.array([-4.0])}
    _, state = transform.update(gradient, state, gradient)
    first_moment = optax.tree.get(state, "mu")
    np.testing.assert_allclose(first_moment["a"], (1 - BETAS[0]) * 0.6, rtol=1e-6)
    np.testing.assert_allclose(first_moment["b"], (1 - BETAS[0]) * -0.8, rtol=1e-6)


def test_gradients_far_below_the_usual_eps_make_whole_steps():
    # With eps = 1e-8 this step would be a hundredth of the rate.
    transform = optimizer(warmup_steps=0, weight_decay=0.0)
    (after,) = run(transform, jnp.zeros(2), [jnp.array([1e-10, -1e-10])])
    np.testing.assert_allclose(after, [-RATE, RATE], rtol=1e-4)


def test_a_zero_gradient_leaves_what_does_not_decay():
    transform = optimizer(weight_decay=0.0)
    (after,) = run(transform, jnp.array([2.0, -1.0]), [jnp.zeros(2)])
    assert after.tolist() == [2.0, -1.0]


PARAMS = {
    "embedding": jnp.array([[1.0, 2.0]]),
    "layers": {"query": jnp.array([3.0]), "query_norm": jnp.array([-1.0])},
}
GRADIENT = {
    "embedding": jnp.array([[300.0, 400.0]]),
    "layers": {"query": jnp.array([0.3]), "query_norm": jnp.array([0.4])},
}


def adamw(max_grad_norm=0.1):
    return make_optimizer(
        make_schedule(learning_rate=0.1, warmup_steps=0),
        beta1=0.9,
        beta2=0.95,
        eps=1e-15,
        weight_decay=0.3,
        max_grad_norm=max_grad_norm,
    )


@pytest.mark.parametrize(
    "patterns, frozen",
    [
        ((), []),
        (("embedding",), ["embedding"]),
        (("layers/query",), ["layers/query"]),  # the whole name: not query_norm
        (("layers/.*",), ["layers/query", "layers/query_norm"]),
        ((".*norm", "embedding"), ["embedding", "layers/query_norm"]),
    ],
)
def test_a_pattern_matches_whole_names(patterns, frozen):
    found = jax.tree_util.tree_leaves_with_path(frozen_params(PARAMS, patterns))
    names = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, held in found
        if held
    ]
    assert names == frozen


@pytest.mark.parametrize(
    "patterns, message",
    [
        (("embeding",), r"'embeding', which .* \['embedding', 'layers/query', "),
        (("layers/(",), r"'layers/\(', which is no regular expression"),
        ((".*",), r"matches every parameter, and leaves nothing to train"),
        (("embedding", "layers/.*"), "matches every parameter"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(patterns, message):
    with pytest.raises(ValueError, match=rf"model\.frozen .*{message}"):
        frozen_params(PARAMS, patterns)


def test_the_others_are_trained_as_if_alone():
    # The gradient of the embedding would rule the norm; only (0.3, 0.4) is clipped.
    optimizer, alone = freeze(adamw(), ("embedding",)), adamw()
    state, others = optimizer.init(PARAMS), PARAMS["layers"]
    alone_state = alone.init(others)
    params = PARAMS
    for _ in range(3):
        updates, state = optimizer.update(GRADIENT, state, params)
        params = optax.apply_updates(params, updates)
        updates, alone_state = alone.update(GRADIENT["layers"], alone_state, others)
        others = optax.apply_updates(others, updates)
    np.testing.assert_array_equal(params["embedding"], PARAMS["embedding"])
    jax.tree.map(np.testing.assert_array_equal, params["layers"], others)
    moments = [leaf.size for leaf in jax.tree.leaves(optax.tree.get(state, "mu"))]
    assert moments == [1, 1]  # none of the embedding's two


def test_nothing_frozen_is_the_optimizer_itself():
    optimizer = adamw()
    assert freeze(optimizer, ()) is optimizer


FROZEN = ("embedding", "layers/.*norm")
SHAPE = (1, 2, 1, 2)


def held(tree):
    """Which leaves of the small policy are frozen, and the others alone."""
    kept, rest = [], []
    for frozen, leaf in zip(
        jax.tree.leaves(frozen_params(start_params(), FROZEN)),
        jax.tree.leaves(tree),
        strict=True,
    ):
        (kept if frozen else rest).append(leaf)
    return kept, rest


@pytest.mark.slow
def test_a_step_over_a_mesh_trains_the_others_as_the_slow_loss_says():
    these = Bench(optimizer=freeze(PLAIN, FROZEN), shape=SHAPE)
    step = TrainStep(
        make_accumulate(these.forward, CISPO, frozen=FROZEN),
        make_update(these.optimizer),
        state=these.state(),
        batch=jax.tree.map(lambda leaf: leaf[0], these.batch()),
        mesh=mesh_of(SHAPE),
    )
    after, metrics = step(these.state(), these.batch())
    _, gradient, expected = slow_result()
    frozen, others = held(after.params)
    assert len(frozen) >= 3
    jax.tree.map(np.testing.assert_array_equal, frozen, held(start_params())[0])
    assert_trees_close(others, held(expected)[1], rtol=1e-5, atol=1e-6)
    norm = optax.tree.norm(held(gradient)[1])
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert norm < 0.99 * optax.tree.norm(gradient)


def test_over_a_mesh_moments_lie_as_their_params_and_the_frozen_have_none():
    state = Bench(optimizer=freeze(ADAMW, FROZEN), shape=SHAPE).state()
    params = held(param_shardings(ARCH, mesh_of(SHAPE)))[1]
    for moment in ("mu", "nu"):
        moments = jax.tree.leaves(optax.tree.get(state.opt_state, moment))
        assert [leaf.sharding for leaf in moments] == params


BFLOAT16 = jnp.zeros(0, jnp.bfloat16)


@jax.jit
def rounded(values, seed):
    like = jax.tree.map(lambda _: BFLOAT16, values)
    return round_stochastically(values, like=like, seed=seed)


def neighbours(values):
    """The bfloat16 values towards zero and away from it, as float32."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    inner = bits & np.uint32(0xFFFF0000)
    outer = np.where(bits == inner, inner, inner + np.uint32(0x10000))
    return inner.view(np.float32), outer.astype(np.uint32).view(np.float32)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=50)
@given(st.lists(FINITE, min_size=8, max_size=8), st.integers(0, 2**31 - 1))
def test_a_value_becomes_one_of_its_two_neighbours(values, seed):
    values = np.array(values, np.float32)
    found = np.asarray(rounded(values, seed))
    inner, outer = neighbours(values)
    assert found.dtype == np.float32
    assert np.all((found == inner) | (found == outer))


@settings(deadline=None, max_examples=20)
@given(st.lists(FINITE, min_size=8, max_size=8), st.integers(0, 2**31 - 1))
def test_what_bfloat16_can_say_stays(values, seed):
    with np.errstate(over="ignore"):
        exact = np.array(values, np.float32).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(rounded(exact, seed), exact)


def test_infinities_and_nan_stay():
    for seed in range(20):
        values = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
        found = np.asarray(rounded(values, seed))
        np.testing.assert_array_equal(found, values)
        assert np.signbit(found[4])


@pytest.mark.parametrize("share", [1 / 256, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("start, step", [(1.0, 2.0**-7), (-3.0, -(2.0**-6))])
def test_the_mean_of_many_draws_is_the_value(start, step, share):
    value = np.float32(start + share * step)
    seeds, copies = 64, 1000
    draws = np.stack(
        [rounded(np.full(copies, value), seed) for seed in range(seeds)]
    ).astype(np.float64)
    up = (draws - start) / step
    assert set(np.unique(up)) == {0.0, 1.0}
    exact = (float(value) - start) / step
    error = (exact * (1 - exact) / draws.size) ** 0.5
    assert abs(up.mean() - exact) < 4 * error
    # Neither does a place, or a seed, have odds of its own: counts spread as draws do.
    for axis, count in ((0, seeds), (1, copies)):
        spread = up.mean(axis=axis).std() / (exact * (1 - exact) / count) ** 0.5
        assert 0.6 < spread < 1.4


def test_draws_differ_by_leaf_and_by_seed_and_not_from_call_to_call():
    values = {name: np.full(1000, 1.001, np.float32) for name in ("query", "key")}
    first, again, later = rounded(values, 3), rounded(values, 3), rounded(values, 4)
    for name in values:
        np.testing.assert_array_equal(first[name], again[name])
        assert np.any(first[name] != later[name])
    assert np.any(first["query"] != first["key"])


def test_float32_leaves_are_left_alone():
    values = {"wide": jnp.full(3, 1.001)}
    found = round_stochastically(
        values, like={"wide": jnp.zeros(3)}, seed=jnp.zeros((), jnp.int32)
    )
    np.testing.assert_array_equal(found["wide"], values["wide"])
