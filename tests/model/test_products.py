"""Float32 products by bfloat16 terms, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.model.products import _terms, by_terms, float32_einsum

WHOLE = 2.0**-24  # half a unit in the last place of float32


@given(
    st.floats(-(2.0**120), 2.0**120, width=32).filter(
        lambda x: x == 0 or abs(x) > 2.0**-100
    )
)
@settings(deadline=None)
def test_three_terms_are_the_number(number):
    terms = _terms(jnp.array([number], jnp.float32), 3)
    assert len(terms) == 3 and all(each.dtype == jnp.bfloat16 for each in terms)
    assert sum(float(each[0]) for each in terms) == number


# With three terms the sum of 300 products has the error of float32.  With two the
# rest of an operand is at most 2^-17 of it: two roundings to 8 bits, 2^-9 and 2^-8.
@pytest.mark.parametrize(
    "left, right, terms, products, error",
    [
        ("float32", "float32", 3, 6, 4 * WHOLE),
        ("bfloat16", "float32", 3, 3, 4 * WHOLE),
        ("float32", "bfloat16", 3, 3, 4 * WHOLE),
        ("bfloat16", "bfloat16", 3, 1, 4 * WHOLE),
        ("float32", "float32", 2, 3, 2.0**-15),
        ("bfloat16", "float32", 2, 2, 2.0**-17),
        ("bfloat16", "bfloat16", 2, 1, 4 * WHOLE),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_product_by_terms_is_one_in_float32(
    left, right, terms, products, error, seed
):
    draws = np.random.default_rng(seed)
    scales = 10.0 ** draws.integers(-6, 6, size=(40, 1))
    a = jnp.asarray(draws.standard_normal((40, 300)) * scales, left)
    b = jnp.asarray(draws.standard_normal((50, 300)), right)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    size = np.abs(np.asarray(a, np.float64)) @ np.abs(np.asarray(b, np.float64)).T
    einsum = functools.partial(by_terms, "rd,vd->rv", terms=terms)
    bounds = {einsum: error, functools.partial(float32_einsum, *einsum.args): 4 * WHOLE}
    for each, bound in bounds.items():
        found = each(a, b)
        assert found.dtype == jnp.float32
        assert np.max(np.abs(found - exact) / size) < bound
    assert str(jax.make_jaxpr(einsum)(a, b)).count("dot_general[") == products


def test_two_terms_are_jaxs_high_precision_and_three_its_highest():
    for terms, name in ((2, "high"), (3, "highest")):
        run = functools.partial(float32_einsum, "rd,vd->rv", terms=terms)
        text = jax.jit(run).lower(*[jnp.ones((2, 3))] * 2).as_text()
        assert text.count(f"precision = [{name.upper()}, {name.upper()}]") == 1


def test_a_value_that_is_not_finite_gives_one():
    ones = jnp.ones((1, 2))
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        found = by_terms("rd,vd->rv", jnp.array([[1.0, bad]]), ones)
        assert not jnp.isfinite(found).any()
