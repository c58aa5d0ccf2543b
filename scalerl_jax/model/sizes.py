"""Sizes of published decoders, and of our own small one, that a config can name.

A checkpoint brings its own, so that a run from one does without this list.
"""

import dataclasses

from scalerl_jax.model.architecture import (
    Architecture,
    Experts,
    LocalLayers,
)
from scalerl_jax.model.rope import Llama3Scaling

_QWEN3_8B = Architecture(
    family="qwen3",
    vocab_size=151_936,
    hidden_size=4096,
    ffn_size=12_288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1_000_000.0,
    rms_eps=1e-6,
    tied_embeddings=False,
    max_positions=40_960,
    qk_norm=True,
)

# Qwen/Qwen3-30B-A3B, config.json.
_QWEN3_30B_A3B = dataclasses.replace(
    _QWEN3_8B,
    family="qwen3_moe",
    hidden_size=2048,
    ffn_size=768,
    num_layers=48,
    num_kv_heads=4,
    experts=Experts(count=128, top_k=8, gate="normalized"),
)

ARCHITECTURES: dict[str, Architecture] = {
    # meta-llama/Llama-3.1-8B, config.json
    "llama3.1-8b": Architecture(
        family="llama",
        vocab_size=128_256,
        hidden_size=4096,
        ffn_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500_000.0,
        rms_eps=1e-5,
        tied_embeddings=False,
        max_positions=131_072,
        rope_scaling=Llama3Scaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=8192,
        ),
    ),
    # Qwen/Qwen3-8B and Qwen/Qwen3-32B, config.json
    "qwen3-8b": _QWEN3_8B,
    "qwen3-32b": dataclasses.replace(
        _QWEN3_8B, hidden_size=5120, ffn_size=25_600, num_layers=64, num_heads=64
    ),
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    # Qwen/Qwen3-235B-A22B, config.json
    "qwen3-235b-a22b": dataclasses.replace(
        _QWEN3_30B_A3B, hidden_size=4096, ffn_size=1536, num_layers=94, num_heads=64
    ),
    # meta-llama/Llama-4-Scout-17B-16E, text_config of config.json
    "scout": Architecture(
        family="llama4_text",
        vocab_size=202_048,
        hidden_size=5120,
        ffn_size=8192,
        num_layers=48,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500_000.0,
        rms_eps=1e-5,
        tied_embeddings=False,
        max_positions=10_485_760,
        rope_scaling=Llama3Scaling(
            factor=16.0,
            low_freq_factor=1.0,
            high_freq_factor=1.0,
            original_max_positions=8192,
        ),
        experts=Experts(
            count=16, top_k=1, gate="sigmoid", gate_input=True, shared=True
        ),
        local=LocalLayers(
            with_positions=(True, True, True, False) * 12,
            chunk=8192,
            normalized=True,
            scale=0.1,
            floor_positions=8192,
        ),
    ),
    # The laptop policy: about 0.8 million parameters.
    "tiny": Architecture(
        family="qwen3",
        vocab_size=128,
        hidden_size=128,
        ffn_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=10_000.0,
        rms_eps=1e-6,
        tied_embeddings=True,
        max_positions=512,
        qk_norm=True,
    ),
}
