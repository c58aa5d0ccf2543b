"""Lowering of an engine's programs from shapes, without the devices.

The engine's mesh may come from `jax.experimental.topologies`: the programs lowered here
compile for it and report their memory, without an array on any device.
"""

from typing import Any

import jax
import jax.numpy as jnp

from scalerl_jax.model.architecture import sampler_layout
from scalerl_jax.sampler.decoding import DecodeState
from scalerl_jax.sampler.engine import Engine, empty_chunk
from scalerl_jax.types import PyTree


def sampler_params(engine: Engine) -> PyTree:
    """Return shapes and shardings of an engine's params, sharded over "tensor"."""
    settings = engine.settings
    return sampler_layout(
        settings.arch,
        dtype=settings.dtype,
        mesh=engine.mesh,
        weights_dtype=settings.weights_dtype,
    )


def decode_state(engine: Engine) -> DecodeState:
    """Return shapes and shardings of `init_decode_state`."""
    programs = engine.programs
    return DecodeState(
        pages=programs.init_pages.eval_shape(), rows=programs.init_rows.eval_shape()
    )


def page_bytes(engine: Engine) -> int:
    """Return bytes of one page, over all layers with such a page on average."""
    pages = jax.tree.leaves(decode_state(engine).pages)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in pages)
    return held // engine.settings.num_pages


def lower_prefill(engine: Engine) -> Any:
    """Lower the prefill of the largest chunk."""
    chunk = empty_chunk(engine.settings, engine.chunk_sizes.largest[0])
    chunk = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), chunk)
    return engine.programs.prefill.lower(
        sampler_params(engine), decode_state(engine), chunk
    )


def lower_generate(engine: Engine) -> Any:
    """Lower the call that decodes the most slots, each of the most pages."""
    rows, width = engine.decode_sizes.largest
    marker = engine.settings.end_of_thinking
    next_states = None
    if marker is not None:
        held = marker.next_states
        next_states = jax.ShapeDtypeStruct(held.shape, held.dtype)
    return engine.programs.generate.lower(
        sampler_params(engine),
        decode_state(engine),
        next_states,
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows, width), jnp.int32),
    )
