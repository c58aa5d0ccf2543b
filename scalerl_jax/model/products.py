"""Products of matrices in float32, also where matrix units multiply bfloat16 alone.

A float32 number is the sum of three bfloat16 terms, of 8 bits each.  XLA multiplies
float32 arrays at the highest precision by their terms on TPUs, and by float32 units on
GPUs, at a fifteenth (H100) of the matrix units' rate; here GPUs multiply terms too.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

TERMS = "products_of_terms"  # scope of these products' names in a compiled program
# Terms of an operand -> JAX's name of the products that these are on a TPU.
_PRECISION = {2: jax.lax.Precision.HIGH, 3: jax.lax.Precision.HIGHEST}


def float32_einsum(
    equation: str, left: Array, right: Array, *, terms: Literal[2, 3] = 3
) -> Float[Array, "..."]:
    """Return `jnp.einsum` of two arrays as float32 products with float32 sums.

    Operands may be bfloat16: they are exact in float32, and have one term.  With two
    `terms`, of 16 bits together, matrix units need half of the products.
    """
    return jax.lax.platform_dependent(
        left,
        right,
        cuda=lambda left, right: by_terms(equation, left, right, terms=terms),
        default=lambda left, right: _at_once(equation, left, right, _PRECISION[terms]),
    )


def _at_once(
    equation: str, left: Array, right: Array, precision: jax.lax.Precision
) -> Array:
    return jnp.einsum(
        equation,
        left.astype(jnp.float32),
        right.astype(jnp.float32),
        precision=precision,
    )


def by_terms(
    equation: str, left: Array, right: Array, *, terms: int = 3
) -> Float[Array, "..."]:
    """Return `float32_einsum` by the bfloat16 terms of its operands.

    Of the nine products of two float32 operands the three smallest are left out, below
    2^-24 of the whole, as XLA does on TPUs; with two `terms`, all but three of them,
    below 2^-15.  A value that is not finite, or rounds to infinity in bfloat16, gives
    one that is not finite.
    """
    lefts, rights = _terms(left, terms), _terms(right, terms)
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
            if i + j < terms
        ]
        return sum(products[1:], start=products[0])


def _terms(x: Array, most: int) -> list[Array]:
    """Return bfloat16 arrays, the largest first; the sum of three is the array."""
    if x.dtype == jnp.bfloat16:
        return [x]
    rest, found = x.astype(jnp.float32), []
    for _ in range(most):
        # XLA may drop a cast to bfloat16 and back, but not this.
        term = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        found.append(term.astype(jnp.bfloat16))
        rest = rest - term
    return found
