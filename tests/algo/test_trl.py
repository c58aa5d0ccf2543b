"""Objectives that TRL has too: its own code, on the same log-probabilities.

`GRPOTrainer._compute_loss` runs on an object that holds what it reads of a trainer; in
place of a model's pass it is given log-probabilities and entropies.
"""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_tokens import make_tokens

from scalerl_jax.algo import advantages, anchors, losses
from scalerl_jax.algo.regularizers import entropy_bonus, kl_k3

torch = pytest.importorskip("torch")
GRPOTrainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer

B, T = 8, 6
CLIP_LOW, CLIP_HIGH, CAP, DUAL_CLIP, TIS_CAP = 0.2, 0.28, 1.5, 1.6, 1.3
KL, ENTROPY = 0.04, 0.01
CLIP = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    lengths = np.array([6, 1, 3, 5, 2, 6, 4, 3])
    logprobs = rng.uniform(-3.0, -0.1, (B, T))
    around = {
        name: logprobs + rng.normal(0.0, 0.5, (B, T))
        for name in ("old", "reference", "sampler")
    }
    around["old"][6] -= 0.5  # a rewarded sequence past its bound
    return {
        "logprobs": logprobs,
        "entropy": rng.uniform(0.1, 3.0, (B, T)),
        "advantages": rng.normal(size=B),
        "mask": np.arange(T) < lengths[:, None],
        **around,
    }


def trl_loss(batch, *, kl=0.0, entropy=0.0, tis_cap=None, **settings):
    """Its loss, and gradients by log-probabilities and entropies."""
    settings = {"loss_type": "grpo", "level": "token", "delta": None} | settings
    given = {
        name: torch.tensor(values, requires_grad=name in ("logprobs", "entropy"))
        for name, values in batch.items()
    }
    mask = given["mask"].double()
    cispo = settings["loss_type"] == "cispo"
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (
            given["logprobs"],
            given["entropy"],
            None,
        ),
        args=types.SimpleNamespace(
            delta=settings["delta"],
            use_bias_correction_kl=False,
            steps_per_generation=1,
        ),
        accelerator=types.SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            sync_gradients=True,
        ),
        model=types.SimpleNamespace(training=True),
        loss_type=settings["loss_type"],
        importance_sampling_level=settings["level"],
        epsilon_low=CLIP_LOW,
        epsilon_high=CAP if cispo else CLIP_HIGH,
        beta=kl,
        _entropy_bonus_enabled=bool(entropy),
        entropy_coef=entropy,
        use_adaptive_entropy=False,
        use_vllm=tis_cap is not None,
        vllm_importance_sampling_correction=tis_cap is not None,
        max_completion_length=T,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    )
    inputs = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["reference"],
        "num_items_in_batch": mask.sum(),
    }
    if tis_cap is not None:
        drift = torch.exp(given["old"] - given["sampler"])
        inputs["importance_sampling_ratio"] = drift.clamp(max=tis_cap)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), *(
        np.zeros((B, T)) if given[name].grad is None else given[name].grad.numpy()
        for name in ("logprobs", "entropy")
    )


def our_loss(batch, token_loss, weigh, *, kl=0.0, entropy=0.0):
    """Return that of ours; its ratios are over the old policy's log-probabilities."""

    def loss(logprobs, entropies):
        tokens = make_tokens(
            logprobs,
            batch["sampler"],
            batch["advantages"][:, None],
            entropy=entropies,
            proximal=batch["old"],
            reference=batch["reference"],
            mask=batch["mask"],
        )
        found = token_loss(tokens)
        found += kl * kl_k3(tokens.logprobs, tokens.scores["reference"])
        found += entropy_bonus(tokens.entropy, coefficient=entropy)
        return (weigh(tokens.mask) * jnp.where(tokens.mask, found, 0.0)).sum()

    arrays = (jnp.float32(batch["logprobs"]), jnp.float32(batch["entropy"]))
    value, slopes = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*arrays)
    return value, *slopes


def assert_equal(ours, theirs):
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_batch_has_ratios_past_every_bound(batch):
    log_ratios, mask = batch["logprobs"] - batch["old"], batch["mask"]
    lengths = mask.sum(axis=1)
    of_sequences = np.exp(np.where(mask, log_ratios, 0.0).sum(axis=1) / lengths)
    rewarded = batch["advantages"] > 0
    for ratio, up in (
        (np.exp(log_ratios[mask]), np.repeat(rewarded, lengths)),
        (of_sequences, rewarded),
    ):
        assert (ratio > 1 + CLIP_HIGH)[up].any()
        assert (ratio < 1 - CLIP_LOW)[~up].any()
        assert (ratio > max(DUAL_CLIP, CAP))[~up].any()
    assert (np.exp(batch["old"] - batch["sampler"])[mask] > TIS_CAP).any()


@anchors.anchored
def clipped(tokens):
    return losses.clipped_loss(tokens, **CLIP)


def constant(mask):
    return advantages.constant_weights(mask, max_tokens=T)


@pytest.mark.parametrize("kl", [0.0, KL])
@pytest.mark.parametrize(
    "loss_type, weigh",
    [
        pytest.param("grpo", advantages.sample_weights, id="grpo"),
        pytest.param("bnpo", advantages.token_weights, id="bnpo"),
        pytest.param("dapo", advantages.token_weights, id="dapo: token, not prompt"),
        pytest.param("dr_grpo", constant, id="dr_grpo"),
    ],
)
def test_clipped_losses_and_k3_are_those_of_trl(batch, loss_type, weigh, kl):
    theirs = trl_loss(batch, loss_type=loss_type, kl=kl)
    assert_equal(our_loss(batch, clipped, weigh, kl=kl), theirs)


def test_cispo_is_that_of_trl_whose_epsilon_high_is_the_cap_and_weights_are_of_tokens(
    batch,
):
    @anchors.anchored
    def cispo(tokens):
        return losses.cispo_loss(tokens, max_importance_ratio=CAP)

    theirs = trl_loss(batch, loss_type="cispo")
    assert_equal(our_loss(batch, cispo, advantages.token_weights), theirs)


@pytest.mark.parametrize("kl", [0.0, KL])
def test_gspo_is_that_of_trl_at_the_level_of_sequences(batch, kl):
    @anchors.anchored
    def of_sequences(tokens):
        return losses.gspo_loss(tokens, **CLIP)

    theirs = trl_loss(batch, level="sequence", kl=kl)
    assert_equal(
        our_loss(batch, of_sequences, advantages.sample_weights, kl=kl), theirs
    )


def test_dual_clip_is_trls_delta(batch):
    @anchors.anchored
    def dual_clip(tokens):
        return losses.dual_clip_loss(tokens, **CLIP, dual_clip=DUAL_CLIP)

    theirs = trl_loss(batch, delta=DUAL_CLIP)
    assert_equal(our_loss(batch, dual_clip, advantages.sample_weights), theirs)


def test_the_correction_is_trls_token_truncation(batch):
    corrected = anchors.corrected(clipped, max_importance_ratio=TIS_CAP)
    theirs = trl_loss(batch, tis_cap=TIS_CAP, kl=KL)
    assert_equal(our_loss(batch, corrected, advantages.sample_weights, kl=KL), theirs)


def test_the_entropy_bonus_is_trls_with_token_weights_for_its_is_always_a_token_mean(
    batch,
):
    theirs = trl_loss(batch, loss_type="dapo", entropy=ENTROPY)
    ours = our_loss(batch, clipped, advantages.token_weights, entropy=ENTROPY)
    assert_equal(ours, theirs)
