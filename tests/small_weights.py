"""Small params on learners and replicas of any layout, and versions that follow."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from small_model import small_architecture

from scalerl_jax.learner.publish import make_publish, make_snapshot
from scalerl_jax.model.architecture import param_shardings, sampler_layout
from scalerl_jax.model.transformer import abstract_params
from scalerl_jax.parallel import multihost
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.weights.manifest import Manifest, merge
from scalerl_jax.weights.publication import receive
from scalerl_jax.weights.shards import own_shards

# Four heads of each kind: they can be cut over four devices.
ARCH = small_architecture(family="qwen2", num_heads=4, num_kv_heads=4)
# Of four devices: cut over processes, and copies of all in each process.
LEARNERS = (dict(fsdp=4), dict(data=2, tensor=2))
BFLOAT16 = jnp.dtype("bfloat16")


def mesh(first, last, **axes):
    return make_mesh(jax.devices()[first:last], **axes)


@functools.cache
def host_params(version):
    """Params of a version; each differs from the one before in a tenth of them."""
    if version == 0:
        rng = np.random.default_rng(0)
        return jax.tree.map(
            lambda leaf: rng.normal(size=leaf.shape).astype(np.float32),
            abstract_params(ARCH, dtype=jnp.float32),
        )
    rng = np.random.default_rng(version)
    return jax.tree.map(
        lambda leaf: (
            leaf * np.where(rng.random(leaf.shape) < 0.1, 1.01, 1.0).astype(np.float32)
        ),
        host_params(version - 1),
    )


def learner_params(version, on):
    return multihost.put_global(host_params(version), param_shardings(ARCH, on))


@functools.cache
def snapshot_on(on):
    return make_snapshot(ARCH, dtype=BFLOAT16, learner_mesh=on)


def shards(version, on):
    return own_shards(snapshot_on(on)(learner_params(version, on)))


def layout(on):
    return sampler_layout(ARCH, dtype=BFLOAT16, mesh=on)


def published(*parts):
    """What the manifests of ranks come to, by way of texts."""
    found = merge([Manifest.from_json(part.to_json()) for part in parts])
    return Manifest.from_json(found.to_json())


def with_shards(manifest, change):
    return dataclasses.replace(manifest, shards=tuple(map(change, manifest.shards)))


@functools.cache
def published_alone(version):
    """Params on the host, as they are published within one process."""
    learner, replica = mesh(0, 4, fsdp=4), mesh(4, 6, tensor=2)
    publish = make_publish(
        ARCH, dtype=BFLOAT16, learner_mesh=learner, sampler_mesh=replica
    )
    number = jax.device_put(np.int32(version), NamedSharding(learner, PartitionSpec()))
    found = publish(learner_params(version, learner), number)
    return jax.device_get(receive(found, policy_version=version))


def assert_is_version(params, version):
    """Bit for bit what is published within one process."""

    def check(found, wanted):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(
            np.asarray(found).view(np.uint16), np.asarray(wanted).view(np.uint16)
        )

    jax.tree.map(check, params, published_alone(version))
