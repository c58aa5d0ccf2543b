"""Log-probabilities of whole batches, of any params, without a gradient."""

import jax
import numpy as np
import pytest
from small_step import (
    FAST_COMPILE,
    bench,
    make_sequences,
    mesh_of,
    sampled_logprobs,
    start_params,
)

from scalerl_jax.learner.scoring import Scorer, make_logprobs


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 2, 2)])
def test_every_token_has_the_log_probability_of_whole_rows_of_logits(shape):
    these = bench(shape=shape, rows=2, row_tokens=24)
    state, batch = these.state(), these.batch()
    score = Scorer(
        make_logprobs(these.forward),
        params=state.params,
        batch=jax.tree.map(lambda leaf: leaf[0], batch),
        mesh=mesh_of(shape),
        compiler_options=FAST_COMPILE,
    )
    found = score(state.params, batch)
    assert isinstance(found, np.ndarray) and found.shape == batch.mask.shape
    expected = jax.jit(sampled_logprobs, compiler_options=FAST_COMPILE)(start_params())
    behavior = np.concatenate([s.behavior_logprobs[s.mask] for s in make_sequences()])
    # Tokens are told apart by their behavior log-probabilities.
    by_token = zip(batch.behavior_logprobs[batch.mask], found[batch.mask], strict=True)
    wanted = zip(behavior, np.concatenate(expected), strict=True)
    np.testing.assert_allclose(sorted(by_token), sorted(wanted), rtol=1e-5, atol=1e-6)
