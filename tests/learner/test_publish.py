"""What the sampler receives: the same values, cast, in memory of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import small_architecture

from scalerl_jax.learner.publish import make_publish
from scalerl_jax.model.shardings import param_shardings
from scalerl_jax.model.transformer import abstract_params, unstack_layers
from scalerl_jax.parallel.mesh import make_learner_mesh

ARCH = small_architecture(family="qwen2")


@functools.cache
def host_params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32),
        abstract_params(ARCH, dtype=jnp.float32),
    )


def learner_params(mesh):
    return jax.device_put(host_params(), param_shardings(ARCH, mesh))


def buffers(tree):
    """Addresses of all the memory that a tree owns."""
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    }


def mesh_of(devices, shape):
    return make_learner_mesh(devices, *shape)


@pytest.mark.parametrize(
    "learner, sampler",
    [
        pytest.param((0, 1, (1, 1, 1)), (0, 1, (1, 1, 1)), id="one device for both"),
        pytest.param((0, 4, (1, 4, 1)), (0, 1, (1, 1, 1)), id="one of the learner"),
        pytest.param((0, 4, (1, 2, 2)), (6, 8, (1, 1, 2)), id="apart, equal shards"),
        pytest.param((0, 4, (2, 2, 1)), (6, 8, (1, 1, 2)), id="apart, other shards"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sampler_gets_the_values_on_its_own_devices(learner, sampler, dtype):
    devices = jax.devices()
    learner_mesh = mesh_of(devices[learner[0] : learner[1]], learner[2])
    sampler_mesh = mesh_of(devices[sampler[0] : sampler[1]], sampler[2])
    publish = make_publish(
        ARCH,
        dtype=jnp.dtype(dtype),
        learner_mesh=learner_mesh,
        sampler_mesh=sampler_mesh,
    )
    published = publish(learner_params(learner_mesh))

    def check(leaf, original):
        assert leaf.dtype == dtype
        assert leaf.sharding.device_set == set(sampler_mesh.devices.flat)
        np.testing.assert_array_equal(leaf, original.astype(jnp.dtype(dtype)))

    jax.tree.map(check, published, unstack_layers(host_params(), ARCH))
    # Heads are cut over the sampler's tensor axis, and nothing over fsdp.
    shards = sampler_mesh.shape["tensor"]
    query = published["layers"][1]["query"].addressable_shards[0].data
    assert query.shape == (16, 32 // shards)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_survives_the_donation(dtype):
    mesh = mesh_of(jax.devices()[:1], (1, 1, 1))
    publish = make_publish(
        ARCH, dtype=jnp.dtype(dtype), learner_mesh=mesh, sampler_mesh=mesh
    )
    params = learner_params(mesh)
    published = publish(params)
    assert not buffers(published) & buffers(params)
    # As the train step does: it writes new params into the memory of the old.
    overwrite = jax.jit(
        lambda tree: jax.tree.map(lambda leaf: 0.0 * leaf, tree), donate_argnums=0
    )
    jax.block_until_ready(overwrite(params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    jax.tree.map(
        lambda leaf, original: np.testing.assert_array_equal(
            leaf, original.astype(jnp.dtype(dtype))
        ),
        published,
        unstack_layers(host_params(), ARCH),
    )


def test_a_later_version_leaves_the_one_before_alone():
    mesh = mesh_of(jax.devices()[:1], (1, 1, 1))
    publish = make_publish(
        ARCH, dtype=jnp.dtype("float32"), learner_mesh=mesh, sampler_mesh=mesh
    )
    params = learner_params(mesh)
    first = publish(params)
    second = publish(jax.tree.map(lambda leaf: leaf + 1.0, params))
    assert not buffers(first) & buffers(second)
    np.testing.assert_array_equal(first["embedding"], host_params()["embedding"])
    np.testing.assert_array_equal(second["embedding"], host_params()["embedding"] + 1)
