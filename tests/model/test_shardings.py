"""What the sharding table makes of real shapes, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.model.architecture import batch_sharding, param_shardings
from scalerl_jax.model.sizes import ARCHITECTURES
from scalerl_jax.model.transformer import abstract_params
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.types import PackedBatch

TINY = ARCHITECTURES["tiny"]  # 4 heads, 2 kv heads, hidden 128, vocabulary 128


def mesh_of(data, fsdp, tensor):
    return make_mesh(
        jax.devices()[: data * fsdp * tensor], data=data, fsdp=fsdp, tensor=tensor
    )


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 8, 1), (2, 2, 2), (8, 1, 1)])
def test_a_device_holds_its_share_of_every_matrix_and_whole_norms(random_params, sizes):
    _, fsdp, tensor = sizes
    params = random_params(TINY)
    placed = jax.device_put(params, param_shardings(TINY, mesh_of(*sizes)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(placed):
        parts = leaf.size / leaf.addressable_shards[0].data.size
        name = jax.tree_util.keystr(path)
        assert parts == (1 if "norm" in name else fsdp * tensor), name
    jax.tree.map(np.testing.assert_array_equal, placed, params)


@pytest.mark.parametrize("name", ["llama3.1-8b", "qwen3-8b"])
def test_the_8b_shapes_fit_eight_devices_in_every_direction(name):
    arch = ARCHITECTURES[name]
    abstract = abstract_params(arch, dtype=jnp.dtype("bfloat16"))
    for sizes in [(1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 4, 2)]:
        shardings = param_shardings(arch, mesh_of(*sizes))
        shapes = jax.tree.map(
            lambda leaf, cut: cut.shard_shape(leaf.shape), abstract, shardings
        )
        held = sum(np.prod(shape) for shape in jax.tree.leaves(shapes, is_leaf=_tuple))
        # Norms are whole everywhere: 0.02 % of the parameters.
        assert held == pytest.approx(arch.num_params / sizes[1] / sizes[2], rel=1e-3)


def _tuple(leaf):
    return isinstance(leaf, tuple)


@pytest.mark.parametrize(
    "changes, sizes, message",
    [
        pytest.param(
            dict(num_kv_heads=2),
            (1, 1, 4),
            "mesh.tensor = 4 .*layers/key: kv_heads = 2",
            id="a cut through a head",
        ),
        pytest.param(
            dict(hidden_size=130),
            (1, 4, 1),
            "mesh.fsdp = 4 .* embedding: hidden = 130",
            id="hidden size",
        ),
        pytest.param(
            dict(vocab_size=129),
            (1, 1, 2),
            "mesh.tensor = 2 .*embedding: vocab = 129",
            id="vocabulary",
        ),
        pytest.param(
            dict(ffn_size=383),
            (1, 1, 2),
            "mesh.tensor = 2 .*layers/down: ffn = 383",
            id="feed-forward size",
        ),
    ],
)
def test_uneven_cuts_are_refused_by_name(changes, sizes, message):
    arch = dataclasses.replace(TINY, **changes)
    with pytest.raises(ValueError, match=message):
        param_shardings(arch, mesh_of(*sizes))


def test_a_batch_is_cut_by_rows_over_data_and_fsdp_and_by_tokens_over_context():
    values = np.arange(32).reshape(4, 8)
    batch = PackedBatch(
        **{field.name: values for field in dataclasses.fields(PackedBatch)}
    )
    mesh = make_mesh(jax.devices(), data=2, fsdp=2, context=2)
    placed = jax.device_put(batch, batch_sharding(mesh))
    for leaf in jax.tree.leaves(placed):
        assert leaf.sharding.spec == jax.P(
            ("slices", "data", "fsdp", "expert"), "context"
        )
    for shard in placed.tokens.addressable_shards:
        _, data, fsdp, _, context, _ = np.argwhere(mesh.devices == shard.device)[0]
        row, first = 2 * data + fsdp, 4 * context  # 4 rows over 4 places, 8 tokens
        np.testing.assert_array_equal(shard.data, values[[row], first : first + 4])
