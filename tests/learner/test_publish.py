"""What the sampler receives: the same values in memory of its own, or nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small_model import small_architecture

from scalerl_jax.config import Config, ModelConfig
from scalerl_jax.config.sections import SamplerConfig
from scalerl_jax.evaluate import policy
from scalerl_jax.learner.publish import make_publish
from scalerl_jax.model.architecture import (
    Experts,
    param_shardings,
    sampler_layout,
    sampler_mesh,
    sampler_shardings,
)
from scalerl_jax.model.quantized import MATRICES, quantize
from scalerl_jax.model.transformer import abstract_params, unstack_layers
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.weights.publication import leaf_checksums, receive

# Eight heads of each kind: they can be cut over all eight devices.
ARCH = small_architecture(family="qwen2", num_heads=8, num_kv_heads=8, head_dim=4)


@functools.cache
def host_params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32),
        abstract_params(ARCH, dtype=jnp.float32),
    )


def learner_params(mesh):
    return jax.device_put(host_params(), param_shardings(ARCH, mesh))


def number(mesh, value):
    return jax.device_put(jnp.int32(value), NamedSharding(mesh, PartitionSpec()))


def buffers(tree):
    """Addresses of all the memory that a tree owns."""
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    }


def make(first, last, **axes):
    return make_mesh(jax.devices()[first:last], **axes)


@functools.cache
def alone():
    """A publish on one device for both, of which the version can be set."""
    mesh = make(0, 1)
    publish = make_publish(
        ARCH, dtype=jnp.dtype("float32"), learner_mesh=mesh, sampler_mesh=mesh
    )
    return lambda params, version: publish(params, number(mesh, version))


def unchanged(params, dtype="float32"):
    jax.tree.map(
        lambda leaf, original: np.testing.assert_array_equal(
            leaf, original.astype(jnp.dtype(dtype))
        ),
        params,
        unstack_layers(host_params(), ARCH),
    )


MESHES = {
    "one device for both": ((0, 1), {}, (0, 1), 1),
    "the learner's tensor group": ((0, 4), dict(fsdp=2, tensor=2), (0, 2), 2),
    "all of the learner's": ((0, 8), dict(tensor=8), (0, 8), 8),
    "all of the learner's, other cuts": ((0, 8), dict(data=2, fsdp=4), (0, 8), 8),
    "apart, equal shards": ((0, 4), dict(fsdp=2, tensor=2), (6, 8), 2),
    "apart, more shards": ((0, 4), dict(data=2, fsdp=2), (4, 8), 4),
    "apart, fewer shards": ((0, 4), dict(tensor=4), (6, 8), 2),
    "apart, every axis": ((0, 4), dict(fsdp=2, context=2), (4, 8), 4),
    "apart, a part of an axis": ((0, 4), dict(fsdp=4), (6, 8), 2),
    "apart, six and two": ((0, 6), dict(data=3, tensor=2), (6, 8), 2),
    # No multiple: arrays that hold every second, fourth shard.
    "apart, two and four": ((0, 2), dict(fsdp=2), (4, 8), 4),
    "apart, one and four": ((0, 1), dict(), (4, 8), 4),
    "overlapping, six and four": ((0, 6), dict(data=3, tensor=2), (4, 8), 4),
}


@pytest.mark.parametrize("case", MESHES)
def test_shards_reach_the_sampler_bit_for_bit_and_not_through_the_host(case):
    learner, axes, sampler, shards = MESHES[case]
    learner_mesh = make(*learner, **axes)
    sampler_mesh = make(*sampler, tensor=shards)
    publish = make_publish(
        ARCH,
        dtype=jnp.dtype("bfloat16"),
        learner_mesh=learner_mesh,
        sampler_mesh=sampler_mesh,
    )
    params, version = learner_params(learner_mesh), number(learner_mesh, 3)
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        published = publish(params, version)
    received = receive(published, policy_version=3)
    unchanged(received, "bfloat16")

    def check(leaf, sharding):
        assert leaf.dtype == jnp.bfloat16
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert leaf.sharding.device_set == set(sampler_mesh.devices.flat)

    jax.tree.map(check, received, sampler_shardings(ARCH, sampler_mesh))
    query = received["layers"][1]["query"].addressable_shards[0].data
    assert query.shape == (16, 32 // shards)  # whole heads, and nothing over fsdp
    assert not buffers(received) & buffers(params)


MIXTURE = small_architecture(
    family="qwen3_moe",
    num_heads=4,
    num_kv_heads=2,
    experts=Experts(count=8, top_k=2, gate="normalized"),
)


@pytest.mark.parametrize(
    "learner, axes, sampler",
    [
        ((0, 4), dict(fsdp=4, expert=2), (4, 8)),
        ((0, 2), dict(fsdp=2), (4, 8)),
        ((0, 8), dict(fsdp=8, expert=4), (0, 8)),
        ((0, 3), dict(data=3), (4, 8)),
    ],
)
def test_whole_experts_reach_more_devices_than_there_are_kv_heads(
    learner, axes, sampler
):
    params = jax.tree.map(
        lambda leaf: np.random.default_rng(0).normal(size=leaf.shape).astype("float32"),
        abstract_params(MIXTURE, dtype=jnp.float32),
    )
    learner_mesh = make(*learner, **axes)
    mesh = sampler_mesh(MIXTURE, jax.devices()[slice(*sampler)])
    publish = make_publish(
        MIXTURE,
        dtype=jnp.dtype("bfloat16"),
        learner_mesh=learner_mesh,
        sampler_mesh=mesh,
    )
    own = jax.device_put(params, param_shardings(MIXTURE, learner_mesh))
    version = number(learner_mesh, 3)
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        published = publish(own, version)
    received = receive(published, policy_version=3)
    layouts = sampler_shardings(MIXTURE, mesh)
    wanted = unstack_layers(params, MIXTURE)
    for leaf, sharding, original in zip(
        *map(jax.tree.leaves, (received, layouts, wanted)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        np.testing.assert_array_equal(leaf, original.astype("bfloat16"))
    down = received["layers"][0]["expert_down"].addressable_shards[0].data
    assert len(down) == MIXTURE.experts.count // mesh.size


@pytest.mark.parametrize("case", ["apart, more shards", "apart, two and four"])
def test_matrices_in_int8_are_those_of_the_whole_weights(case):
    learner, axes, sampler, shards = MESHES[case]
    mesh = make(*sampler, tensor=shards)
    publish = make_publish(
        ARCH,
        dtype=jnp.dtype("bfloat16"),
        learner_mesh=make(*learner, **axes),
        sampler_mesh=mesh,
        weights_dtype="int8",
    )
    params = learner_params(make(*learner, **axes))
    published = publish(params, number(make(*learner, **axes), 3))
    received = receive(published, policy_version=3)
    layout = sampler_layout(
        ARCH, dtype=jnp.dtype("bfloat16"), mesh=mesh, weights_dtype="int8"
    )

    def check(leaf, wanted):
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)

    jax.tree.map(check, received, layout)
    for ours, whole in zip(
        received["layers"], unstack_layers(host_params(), ARCH)["layers"], strict=True
    ):
        for name, weights in whole.items():
            if name in MATRICES:
                expected = quantize(jnp.asarray(weights), dtype=jnp.bfloat16)
                jax.tree.map(np.testing.assert_array_equal, ours[name], expected)
            else:
                np.testing.assert_array_equal(ours[name], weights.astype("bfloat16"))
    # An evaluation loads them in the sampler's dtype.
    loaded = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), host_params())
    config = Config(
        model=ModelConfig(sampler_dtype="bfloat16"),
        sampler=SamplerConfig(weights_dtype="int8"),
    )
    placed = policy._placed(loaded, config, ARCH, mesh)
    jax.tree.map(np.testing.assert_array_equal, received, placed)


def test_the_guard_finds_what_goes_through_the_host():
    # What the cases above rule out does happen with the learner's own layout.
    params = learner_params(make(0, 4, fsdp=4))["embedding"]
    sharding = NamedSharding(make(4, 8, tensor=4), PartitionSpec("tensor"))
    # Reading the memory of a CPU device is no transfer; writing it back is one.
    with (
        jax.transfer_guard_host_to_device("disallow_explicit"),
        pytest.raises(RuntimeError, match="Disallowed host-to-device"),
    ):
        jax.device_put(params, sharding)


def test_a_split_that_costs_memory_is_announced_once(caplog):
    caplog.set_level("INFO")
    meshes = dict(learner_mesh=make(0, 6, data=3, tensor=2))
    meshes["sampler_mesh"] = make(4, 8, tensor=4)
    publish = make_publish(ARCH, dtype=jnp.dtype("float32"), **meshes)
    for version in (0, 1):
        publish(learner_params(meshes["learner_mesh"]), jnp.int32(version))
    (record,) = [each for each in caplog.records if "publishing" in each.message]
    for words in ("1/2 of the params", "generators.devices = 4", "6 devices"):
        assert words in record.getMessage()


def test_shards_that_the_model_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"devices = 8 .* ffn = 20 .* divisor"):
        make_publish(
            small_architecture(ffn_size=20, num_heads=8, num_kv_heads=8),
            dtype=jnp.dtype("float32"),
            learner_mesh=make(0, 8, data=8),
            sampler_mesh=make(0, 8, tensor=8),
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_survives_the_donation(dtype):
    mesh = make(0, 1)
    publish = make_publish(
        ARCH, dtype=jnp.dtype(dtype), learner_mesh=mesh, sampler_mesh=mesh
    )
    params = learner_params(mesh)
    published = publish(params, number(mesh, 0))
    assert not buffers(published) & buffers(params)
    # As the train step does: it writes new params into the memory of the old.
    overwrite = jax.jit(
        lambda tree: jax.tree.map(lambda leaf: 0.0 * leaf, tree), donate_argnums=0
    )
    jax.block_until_ready(overwrite(params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    unchanged(receive(published, policy_version=0), dtype)


def test_a_later_version_leaves_the_one_before_alone():
    params = learner_params(make(0, 1))
    first = alone()(params, 4)
    second = alone()(jax.tree.map(lambda leaf: leaf + 1.0, params), 5)
    assert not buffers(first) & buffers(second)
    unchanged(receive(first, policy_version=4))
    embedding = receive(second, policy_version=5)["embedding"]
    np.testing.assert_array_equal(embedding, host_params()["embedding"] + 1)


def checksum(array, version):
    """The documented sum, element by element in Python's integers."""

    def mix(bits):
        bits = (bits ^ bits >> 16) * 0x85EBCA6B % 2**32
        bits = (bits ^ bits >> 13) * 0xC2B2AE35 % 2**32
        return bits ^ bits >> 16

    bits = array.view(f"uint{8 * array.itemsize}").ravel().tolist()
    return sum(
        [mix(each ^ place * 0x9E3779B1 % 2**32) for place, each in enumerate(bits)],
        start=mix(version),
    ) % (2**32)


def test_the_finalizer_is_that_of_murmurhash():
    # MurmurHash3_x86_32 of four zero bytes, seed 0, is 0x2362F9DE; its body leaves
    # 0xE6546B64, and the length 4 is added before the finalizer.
    assert checksum(np.zeros(0, np.float32), 0xE6546B64 ^ 4) == 0x2362F9DE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cut", [(), ("data",), (None, "tensor"), ("tensor", "data")])
def test_a_checksum_does_not_depend_on_the_cut(dtype, cut):
    array = np.random.default_rng(0).normal(size=(4, 6, 2)).astype(jnp.dtype(dtype))
    array[0, 0] = [-0.0, np.nan]
    placed = jax.device_put(
        array, NamedSharding(make(0, 4, data=2, tensor=2), PartitionSpec(*cut))
    )
    expected = [checksum(array, 7), checksum(array[0, 0], 7)]
    assert leaf_checksums([placed, array[0, 0]], jnp.int32(7)).tolist() == expected


def replaced(published, name, leaf):
    return published.replace(params={**published.params, name: leaf})


def flipped(published):
    bits = jax.lax.bitcast_convert_type(published.params["embedding"], jnp.uint32)
    bits = bits.at[3, 5].set(bits[3, 5] ^ 1)
    leaf = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return replaced(published, "embedding", leaf)


def swapped_elements(published):
    leaf = published.params["head"]
    return replaced(published, "head", leaf[jnp.array([1, 0, *range(2, 16)])])


def swapped_leaves(published):
    head, embedding = (published.params[name] for name in ("head", "embedding"))
    return replaced(replaced(published, "head", embedding), "embedding", head)


def mixed(published):
    """A layer of the version before."""
    first, second = published.params["layers"]
    return replaced(published, "layers", (first, {**second, "up": second["up"] - 1}))


def renamed(published):
    return published.replace(policy_version=published.policy_version + 1)


DAMAGES = [
    (flipped, 6, ["embedding has checksum 0x", "sent was 0x", "(1 of"]),
    (swapped_elements, 6, ["head has checksum"]),
    (swapped_leaves, 6, ["embedding has checksum", "; head has", "(2 of"]),
    (mixed, 6, ["layers/1/up has checksum", "(1 of"]),
    (renamed, 7, ["version 7", "(27 of 27 differ)"]),  # 2 * 12 + 3 leaves
    (lambda published: published, 5, ["version 6 as those of version 5"]),
]


@pytest.mark.parametrize("damage, version, words", DAMAGES)
def test_what_is_not_what_was_sent_is_refused(damage, version, words):
    published = alone()(learner_params(make(0, 1)), 6)
    with pytest.raises(RuntimeError) as failure:
        receive(damage(published), policy_version=version)
    for word in (f"version {version}", "its current params", *words):
        assert word in str(failure.value)
    unchanged(receive(published, policy_version=6))


def test_a_transfer_that_fails_names_the_version():
    learner_mesh, sampler_mesh = make(0, 1), make(1, 2)
    publish = make_publish(
        ARCH,
        dtype=jnp.dtype("float32"),
        learner_mesh=learner_mesh,
        sampler_mesh=sampler_mesh,
    )
    params = learner_params(learner_mesh)
    first = publish(params, number(learner_mesh, 1))
    version = number(learner_mesh, 2)
    with (
        jax.transfer_guard_device_to_device("disallow_explicit"),
        pytest.raises(RuntimeError) as failure,
    ):
        publish(params, version)
    assert "params of version 2 could not be sent" in str(failure.value)
    assert "Disallowed device-to-device transfer" in str(failure.value)
    unchanged(receive(first, policy_version=1))
