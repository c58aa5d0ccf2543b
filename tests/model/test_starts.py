import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import small_architecture

from scalerl_jax.model.transformer import init_params

ARCH = small_architecture(vocab_size=32)


def test_random_starts_are_as_the_table_says():
    arch = small_architecture(family="qwen2", vocab_size=500)
    start = jax.jit(lambda key: init_params(arch, key, dtype=jnp.dtype("float32")))
    for path, leaf in jax.tree_util.tree_leaves_with_path(start(jax.random.key(0))):
        name = path[-1].key
        if "norm" in name:
            np.testing.assert_array_equal(leaf, 1.0)
        elif "bias" in name:
            np.testing.assert_array_equal(leaf, 0.0)
        else:
            assert float(leaf.std()) == pytest.approx(0.02, rel=0.15), name
            assert abs(float(leaf.mean())) < 0.003, name
