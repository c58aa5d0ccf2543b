"""The shape of the small decoders that tests compute with."""

import dataclasses

from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.families import FEATURES, find_family

SMALL = Architecture(
    family="qwen3",
    vocab_size=16,
    hidden_size=16,
    ffn_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=10_000.0,
    rms_eps=1e-6,
    tied_embeddings=False,
    max_positions=64,
    qk_norm=True,
)


def small_architecture(**changes):
    """The small decoder with other fields, and what another family has."""
    family = find_family(changes.get("family", SMALL.family))
    plain = {
        each.name: each.default
        for each in dataclasses.fields(Architecture)
        if each.name in FEATURES
    }
    return dataclasses.replace(SMALL, **plain | family.features | changes)
