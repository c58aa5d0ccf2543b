"""Trained params published alone: whole on the replica, and a fraction of the bytes."""

import jax
import numpy as np
import pytest
from memory_channel import MemoryChannel
from small_weights import ARCH, BFLOAT16, learner_params, mesh, published

from scalerl_jax.config import LoraConfig
from scalerl_jax.learner.publish import (
    make_completion,
    make_publish,
    make_snapshot,
    part_dtypes,
)
from scalerl_jax.model.architecture import param_shardings
from scalerl_jax.model.lora import abstract_factors, join
from scalerl_jax.model.trainable import frozen_params, split
from scalerl_jax.weights.parts import PublishedParts
from scalerl_jax.weights.publication import digest_of, receive
from scalerl_jax.weights.receiving import NotReceivedError
from scalerl_jax.weights.sending import Sender
from scalerl_jax.weights.shards import own_shards

LORA = LoraConfig(rank=2, alpha=3.0, targets=("layers/(query|down)",))
LEARNER, REPLICA = dict(fsdp=4), dict(tensor=2)


def factors(on, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jax.device_put(
            rng.normal(size=leaf.shape).astype(np.float32), leaf.sharding
        ),
        abstract_factors(ARCH, LORA, on),
    )


def frozen_part(on):
    """The trained and the frozen params where patterns hold the embedding and norms."""
    params = learner_params(0, on)
    return split(params, frozen_params(params, ("embedding", ".*norm")))


PARTS = {
    "factors": lambda on, seed: (factors(on, seed), learner_params(0, on)),
    "patterns": lambda on, seed: frozen_part(on),
}


@pytest.mark.parametrize("weights_dtype", ["model", "int8"])
@pytest.mark.parametrize("kind", PARTS)
def test_a_part_is_completed_to_what_is_published_within_a_process(kind, weights_dtype):
    learner, replica = mesh(0, 4, **LEARNER), mesh(4, 6, **REPLICA)
    trained, frozen = PARTS[kind](learner, 0)
    held = jax.device_put(learner_params(0, replica), param_shardings(ARCH, replica))
    if kind == "patterns":
        held = split(held, frozen_params(held, ("embedding", ".*norm")))[1]
    digest = digest_of(frozen)
    assert digest == digest_of(held) != digest_of(learner_params(1, learner))
    channel = MemoryChannel()
    sender = Sender(rank=0, num_ranks=1, channel=channel, frozen_digest=digest)
    snapshot = make_snapshot(
        ARCH, dtype=BFLOAT16, learner_mesh=learner, trained=trained
    )
    abstract = jax.tree.map(
        lambda leaf, kind: jax.ShapeDtypeStruct(
            leaf.shape, kind, sharding=jax.NamedSharding(replica, jax.P())
        ),
        trained,
        part_dtypes(trained, BFLOAT16),
    )
    form = dict(dtype=BFLOAT16, weights_dtype=weights_dtype)
    how = dict(
        complete=make_completion(ARCH, held, sampler_mesh=replica, **form),
        in_place=True,
    )
    source = PublishedParts(channel, abstract, frozen_digest=digest, **how)
    publish = make_publish(ARCH, learner_mesh=learner, sampler_mesh=replica, **form)
    for version in (1, 2):
        trained, _ = PARTS[kind](learner, version)
        part = sender.send(own_shards(snapshot(trained)), policy_version=version)
        found = source.replacing(published(part))()
        number = jax.device_put(np.int32(version), jax.NamedSharding(learner, jax.P()))
        whole = receive(publish(join(trained, frozen), number), policy_version=version)
        jax.tree.map(
            lambda ours, theirs: np.testing.assert_array_equal(
                np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8)
            ),
            found.params,
            whole,
        )
    assert part.frozen_digest == digest
    if kind == "factors":  # query is 16 x 32, down 24 x 16, of two layers; float32
        assert sender.report.full_bytes == 4 * 2 * 2 * (16 + 32 + 24 + 16)
    other = PublishedParts(channel, abstract, frozen_digest="0" * 64, **how)
    with pytest.raises(NotReceivedError, match=f"version 2 .*{digest[:16]}.*0{{16}}"):
        other.replacing(published(part))
