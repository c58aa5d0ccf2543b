"""Compilation of an engine's programs before the first request."""

import jax
import numpy as np

from scalerl_jax.sampler.decoding import empty_rows
from scalerl_jax.sampler.engine import empty_chunk
from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.types import PyTree


def warm_up(pool: PagePool, params: PyTree) -> None:
    """Compile every program, so that no later call waits for a compiler.

    No page may have an owner.
    """
    engine = pool.engine
    params = engine.load_params(params)
    settings, state = engine.settings, pool.state(engine.init_rows())
    for (size,) in engine.chunk_sizes:
        state, _ = engine.prefill(params, state, empty_chunk(settings, size))
    for (count,) in engine.insert_sizes:
        nowhere = np.full(count * settings.copied_pages, settings.num_pages, np.int32)
        state = engine.insert(
            state,
            slots=np.full(count, settings.slots, np.int32),
            rows=empty_rows(settings, count),
            copy_from=nowhere,
            copy_to=nowhere,
        )
    for count, width in engine.decode_sizes:
        state, _ = engine.generate(
            params,
            state,
            slots=np.full(count, settings.slots, np.int32),
            table=np.zeros((count, width), np.int32),
        )
    for sizes in (engine.chunk_sizes, engine.insert_sizes, engine.decode_sizes):
        sizes.compile_all()
    state = engine.free_resource(state, slots=np.zeros(settings.slots, bool))
    pool.pages = jax.block_until_ready(state.pages)
