"""Metrics of the importance ratios, by hand and in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scalerl_jax.algo.diagnostics import token_statistics, token_summary

CAP = 3.0
LOGPROBS = hnp.arrays(
    np.float32, (8,), elements=st.floats(-6, 0, width=32, allow_subnormal=False)
)
STALENESS = hnp.arrays(np.int32, (8,), elements=st.integers(0, 2))
MASKS = hnp.arrays(np.bool_, (8,))


def statistics(*fields):
    return token_statistics(*map(jnp.asarray, fields), max_importance_ratio=CAP)


def summary(*fields):
    """Return metrics; the fields are those of `token_statistics`."""
    return token_summary(*statistics(*fields))


def test_the_summary_by_hand():
    # Ratios 1/2 (fresh), 1 (fresh), 4 (stale); the last place is masked.
    ratios = np.array([0.5, 1.0, 4.0, 100.0], np.float32)
    behavior = np.array([-1.0, -2.0, -3.0, -4.0], np.float32)
    found = summary(
        behavior + np.log(ratios),
        behavior,
        np.array([1.0, 2.0, 6.0, 50.0], np.float32),
        np.array([0, 0, 1, 0]),
        np.array([True, True, True, False]),
    )
    expected = {
        "entropy": 3.0,
        "ratio/mean": 5.5 / 3,
        "ratio/max": 4.0,
        "ratio/capped_share": 1 / 3,
        "ratio/effective_sample_size": 5.5**2 / (3 * 17.25),
        "mismatch/mean_abs": math.log(2.0) / 2,
        "mismatch/max_abs": math.log(2.0),
        "mismatch/kl": (0.5 - 1.0 + math.log(2.0)) / 2,
        "mismatch/tokens": 2.0,
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def test_a_ratio_at_the_cap_is_not_counted_as_capped():
    logprobs, behavior = jnp.log(jnp.array([3.0, 3.1])), jnp.zeros(2)
    # exp(log(3)) may round up: the cap is set to what the ratio is.
    sums, _ = token_statistics(
        logprobs,
        behavior,
        jnp.zeros(2),
        jnp.zeros(2, jnp.int32),
        jnp.ones(2, bool),
        max_importance_ratio=float(jnp.exp(logprobs[0])),
    )
    assert sums["capped"] == 1.0


@settings(deadline=None, max_examples=40)
@given(LOGPROBS, LOGPROBS, LOGPROBS, STALENESS, MASKS, MASKS)
def test_sums_add_and_maxima_join_over_microbatches(
    logprobs, behavior, entropy, staleness, mask, first
):
    fields = (logprobs, behavior, entropy, staleness)
    sums, maxima = statistics(*fields, mask)
    one, other = (statistics(*fields, part) for part in (mask & first, mask & ~first))
    for name, total in sums.items():
        together = one[0][name] + other[0][name]
        np.testing.assert_allclose(together, total, rtol=1e-5, err_msg=name)
    for name, largest in maxima.items():
        assert max(one[1][name], other[1][name]) == largest


@settings(deadline=None, max_examples=40)
@given(LOGPROBS, LOGPROBS, STALENESS, MASKS)
def test_the_summary_agrees_with_float64(logprobs, behavior, staleness, mask):
    found = summary(logprobs, behavior, np.zeros(8, np.float32), staleness, mask)
    difference = (logprobs.astype(np.float64) - behavior)[mask]
    fresh = difference[staleness[mask] == 0]
    ratio = np.exp(difference)
    np.testing.assert_allclose(found["mismatch/tokens"], len(fresh))
    if len(ratio):
        effective = ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())
        np.testing.assert_allclose(found["ratio/mean"], ratio.mean(), rtol=1e-4)
        np.testing.assert_allclose(found["ratio/max"], ratio.max(), rtol=1e-4)
        np.testing.assert_allclose(
            found["ratio/effective_sample_size"], effective, rtol=1e-4
        )
    if len(fresh):
        kl = (np.exp(fresh) - 1.0 - fresh).mean()
        np.testing.assert_allclose(found["mismatch/kl"], kl, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(
            found["mismatch/max_abs"], np.abs(fresh).max(), rtol=1e-5
        )


@pytest.mark.parametrize("wild", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_masked_is_never_seen(wild):
    mask = np.array([True, False])
    tame = np.array([-1.0, -1.0], np.float32)
    strange = np.array([-1.0, wild], np.float32)
    staleness = np.zeros(2, np.int32)
    expected = summary(tame, tame, tame, staleness, mask)
    for found in (
        summary(strange, tame, tame, staleness, mask),
        summary(tame, strange, tame, staleness, mask),
        summary(tame, tame, strange, staleness, mask),
    ):
        assert found == expected


@pytest.mark.parametrize("far", [-100.0, -1e4, -1e30])
def test_no_finite_logprobs_make_a_metric_infinite(far):
    tame, strange = np.array([-1.0, -2.0], np.float32), np.array([-1.0, far], "f4")
    tokens = (tame, np.zeros(2, np.int32), np.ones(2, bool))
    for ratios in ((tame, strange), (strange, tame)):
        assert all(np.isfinite(value) for value in summary(*ratios, *tokens).values())


@pytest.mark.parametrize("far", [-1e5, -1e30, -np.inf])
def test_one_token_adds_no_more_to_the_kl_than_any_softmax_could(far):
    """exp(d) - 1 - d at the bound of a difference, d = -1e4, over two tokens."""
    behavior, trainer = np.array([-1.0, -2.0], "f4"), np.array([-1.0, far], "f4")
    tokens = (behavior, np.zeros(2, np.int32), np.ones(2, bool))
    found = summary(trainer, behavior, *tokens)
    np.testing.assert_allclose(found["mismatch/kl"], (1e4 - 1.0) / 2, rtol=1e-6)


def test_a_batch_without_a_token_has_no_nan():
    nothing = summary(
        *(np.zeros(3, np.float32),) * 3, np.zeros(3, int), np.zeros(3, bool)
    )
    assert all(value == 0.0 for value in nothing.values())
