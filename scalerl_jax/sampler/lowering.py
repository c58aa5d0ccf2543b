"""An engine's programs from shapes alone, for devices that may not be there.

The mesh of the engine may be one of `jax.experimental.topologies`: what is lowered
here compiles for it, and tells its memory, without an array on any device.
"""

from typing import Any

import jax
import jax.numpy as jnp

from scalerl_jax.model.architecture import layered_table, sampler_shardings
from scalerl_jax.sampler.decoding import DecodeState
from scalerl_jax.sampler.engine import Engine, empty_chunk
from scalerl_jax.types import PyTree


def sampler_params(engine: Engine) -> PyTree:
    """The params that an engine is given: shapes, cut over "tensor" alone."""

    settings = engine.settings
    return jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(
            spec.shape, settings.dtype, sharding=sharding
        ),
        layered_table(settings.arch),
        sampler_shardings(settings.arch, engine.mesh),
    )


def decode_state(engine: Engine) -> DecodeState:
    """The shapes of `init_decode_state`, with their shardings."""
    return engine._init.eval_shape()


def lower_prefill(engine: Engine, *, tokens: int | None = None) -> Any:
    """The prefill of a chunk of `tokens` tokens; None: of the largest chunk."""
    chunk = empty_chunk(engine.settings, tokens or engine.chunk_sizes[-1])
    chunk = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), chunk)
    return engine._prefill.lower(sampler_params(engine), decode_state(engine), chunk)


def lower_generate(
    engine: Engine, *, rows: int | None = None, width: int | None = None
) -> Any:
    """The call that decodes `rows` slots of `width` pages; None: the most."""
    rows = rows or engine.row_counts[-1]
    width = width or engine.table_widths[-1]
    marker = engine.settings.end_of_thinking
    next_states = None
    if marker is not None:
        held = marker.next_states
        next_states = jax.ShapeDtypeStruct(held.shape, held.dtype)
    return engine._generate.lower(
        sampler_params(engine),
        decode_state(engine),
        next_states,
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows, width), jnp.int32),
    )
