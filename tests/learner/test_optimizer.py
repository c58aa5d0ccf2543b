"""AdamW and its schedule against torch and by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_run

from scalerl_jax.learner.optimizer import make_optimizer, make_schedule
from scalerl_jax.wiring.learning import make_adamw, make_learning_rates

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
    changes = {"optimizer.learning_rate": 1e-6, "optimizer.warmup_steps": 0}
    batch = {"batch.num_prompts": 16, "batch.group_size": rollouts // 16}
    rates = make_learning_rates(
        small_run.make_config(changes | batch | {"optimizer.base_rollouts": 1024})
    )
    assert float(rates(0)) == pytest.approx(expected, rel=1e-6)


def test_the_rates_of_the_policy_begin_after_the_steps_that_hold_it():
    """A cosine over the 4 steps that are left of 6: 1, (1 + sqrt(1/2)) / 2, 1/2, ..."""
    changes = {
        "objective.advantage": "critic",
        "objective.zero_variance_filter": False,
        "critic.pretrain_steps": 2,
        "optimizer.schedule": "cosine",
        "optimizer.warmup_steps": 0,
        "optimizer.learning_rate": RATE,
        "train.num_steps": 6,
    }
    config = small_run.make_config(changes)
    rates = make_learning_rates(config)
    found = [float(rates(version)) for version in range(7)]
    shares = [0, 0, 1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0]
    np.testing.assert_allclose(found, RATE * np.array(shares), rtol=1e-6, atol=1e-9)
    # The optimizer's own count begins at 0 with the first step that it makes.
    transform, params = make_adamw(config), {"embedding": jnp.zeros(1)}
    state, sizes = transform.init(params), []
    for _ in range(4):
        updates, state = transform.update({"embedding": jnp.ones(1)}, state, params)
        sizes.append(-float(updates["embedding"][0]))
    np.testing.assert_allclose(np.array(sizes) / sizes[0], shares[2:6], rtol=1e-3)
    with pytest.raises(ValueError, match=r"less critic\.pretrain_steps = 2, where the"):
        small_run.make_config(changes | {"optimizer.warmup_steps": 4})


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
