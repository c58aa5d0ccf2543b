"""Products of matrices in float32, also where matrix units multiply bfloat16 alone.

A float32 number is the sum of three bfloat16 terms, of 8 bits each.  XLA multiplies
float32 arrays at the highest precision by their terms on TPUs, and by float32 units on
GPUs, at a fifteenth (H100) of the matrix units' rate; here GPUs multiply terms too.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

TERMS = "products_of_terms"  # scope of these products' names in a compiled program
_TERMS = 3


def float32_einsum(equation: str, left: Array, right: Array) -> Float[Array, "..."]:
    """Return `jnp.einsum` of two arrays as float32 products with float32 sums.

    Operands may be bfloat16: they are exact in float32, and have one term.
    """
    return jax.lax.platform_dependent(
        left,
        right,
        cuda=lambda left, right: by_terms(equation, left, right),
        default=lambda left, right: _at_once(equation, left, right),
    )


def _at_once(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(
        equation,
        left.astype(jnp.float32),
        right.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


def by_terms(equation: str, left: Array, right: Array) -> Float[Array, "..."]:
    """Return `float32_einsum` by the bfloat16 terms of its operands.

    Of the nine products of two float32 operands the three smallest are left out, below
    2^-24 of the whole, as XLA does on TPUs.  A value that is not finite, or rounds to
    infinity in bfloat16, gives one that is not finite.
    """
    lefts, rights = _terms(left), _terms(right)
    pairs = [(i, j) for i in range(len(lefts)) for j in range(len(rights))]
    with jax.named_scope(TERMS):
        products = [
            jnp.einsum(
                equation,
                lefts[i],
                rights[j],
                precision=jax.lax.Precision.DEFAULT,
                preferred_element_type=jnp.float32,
            )
            for i, j in sorted(pairs, key=sum, reverse=True)  # the smallest first
            if i + j < _TERMS
        ]
        return sum(products[1:], start=products[0])


def _terms(x: Array) -> list[Array]:
    """Return bfloat16 arrays whose sum is the array, the largest first."""
    if x.dtype == jnp.bfloat16:
        return [x]
    rest, found = x.astype(jnp.float32), []
    for _ in range(_TERMS):
        # XLA may drop a cast to bfloat16 and back, but not this.
        term = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        found.append(term.astype(jnp.bfloat16))
        rest = rest - term
    return found
