"""The output head as log-probabilities need it: its settings, cut and tiles.

Over a mesh the head is cut as `model.architecture` says, and only a slab of it is
gathered at a time.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from scalerl_jax.model.attention import capped_slope
from scalerl_jax.model.products import float32_einsum
from scalerl_jax.model.transformer import head_logits
from scalerl_jax.parallel.mesh import SHARDS, largest_divisor, num_shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """Settings of log-probabilities; static.  `mesh` None: on one device.

    Weights are rounded to `weights_dtype` if that is narrower than theirs, and their
    gradient is that of the rounded ones.  A float32 product takes fewer passes the more
    of its operands are bfloat16, see `planning.work`.
    """

    mesh: Mesh | None = None
    temperature: float = 1.0
    float32_head: bool = True
    cap: float = 0.0  # of the logits, before the temperature; `attention.capped`
    weights_dtype: DTypeLike = jnp.float32
    chunk_tokens: int = 1024  # per device
    chunk_vocab: int = 16384  # per device

    def gather(self, slab: Array, dtype: jnp.dtype) -> Float[Array, "v D"]:
        """Return all columns of a slab of the head."""
        if not self.float32_head:
            slab = slab.astype(dtype)
        elif slab.dtype == jnp.float32:
            slab = slab.astype(self.weights_dtype)
        if self.mesh is None:
            return slab
        return jax.lax.all_gather(slab, SHARDS, axis=1, tiled=True)

    def scatter(self, of_slab: Float[Array, "v D"]) -> Float[Array, "v columns"]:
        """Return this device's columns, summed over the shards."""
        if self.mesh is None or num_shards(self.mesh) == 1:
            return of_slab
        # Over the first axis: over the last one some TPUs get a whole all-reduce.
        parts = of_slab.reshape(of_slab.shape[0], num_shards(self.mesh), -1)
        return jax.lax.psum_scatter(parts.swapaxes(0, 1), SHARDS, scatter_dimension=0)

    def first_id(self, head: Array) -> Array | int:
        """Return the token id of the first row of this device's part of the head."""
        if self.mesh is None:
            return 0
        return jax.lax.axis_index("tensor") * head.shape[0]

    def logits(self, hidden: Array, slab: Array) -> Float[Array, "c v"]:
        """Return the logits of a tile, divided by the temperature."""
        logits = head_logits(hidden, slab, float32_head=self.float32_head, cap=self.cap)
        return logits / self.temperature

    def of_product(
        self, of_logits: Array, logits: Array, dtype: jnp.dtype
    ) -> Float[Array, "v c"]:
        """Turn cotangents of a tile's `logits` into those of its product.

        They are in its dtype: float32, or that of the hidden states, `dtype`.
        """
        found = of_logits / self.temperature
        if self.cap:
            found *= capped_slope(logits * self.temperature, self.cap)
        return found.astype(jnp.float32 if self.float32_head else dtype)

    def gradient_product(self) -> Callable[..., Array]:
        """Return an einsum of cotangents of logits, with float32 results.

        Of float32 operands it takes 16 bits: hidden states and their cotangents have 8
        where compute is in bfloat16.
        """
        if self.float32_head:
            return functools.partial(float32_einsum, terms=2)
        return functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def tiles(self, hidden: Array, weights: Array) -> tuple[int, Float[Array, "n v D"]]:
        """Return the tokens of a tile, and the slabs of this device's part."""
        tokens, vocab = hidden.shape[0] * hidden.shape[1], weights.shape[0]
        chunk = largest_divisor(tokens, self.chunk_tokens)
        slab = largest_divisor(vocab, self.chunk_vocab)
        return chunk, weights.reshape(vocab // slab, slab, -1)

    def summed(
        self, of_rows: Array, of_weights: Array, hidden: Array, weights: Array
    ) -> tuple[Array, Array]:
        """Turn cotangents of tiles [n, D, c] and slabs into those of the inputs."""
        of_rows = of_rows.swapaxes(1, 2)
        if self.mesh is not None:
            of_rows = jax.lax.psum(of_rows, "tensor")
            of_weights = jax.lax.psum(of_weights, ("data", "context"))
        return (
            of_rows.reshape(hidden.shape).astype(hidden.dtype),
            of_weights.reshape(weights.shape).astype(weights.dtype),
        )
