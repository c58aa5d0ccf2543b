"""Architectures of published decoders and of the tiny one, by name, for configs.

A run from a checkpoint does not need this list, since the checkpoint has its own.
"""

import dataclasses

from scalerl_jax.model.architecture import (
    Architecture,
    Experts,
    LocalLayers,
)
from scalerl_jax.model.rope import Llama3Scaling, Rope, YarnScaling

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

# mistralai/Mistral-7B-v0.3, config.json
_MISTRAL_7B = Architecture(
    family="mistral",
    vocab_size=32_768,
    hidden_size=4096,
    ffn_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1_000_000.0,
    rms_eps=1e-5,
    tied_embeddings=False,
    max_positions=32_768,
)

# allenai/OLMo-2-1124-7B, config.json
_OLMO2_7B = dataclasses.replace(
    _MISTRAL_7B,
    family="olmo2",
    vocab_size=100_352,
    ffn_size=11_008,
    num_kv_heads=32,
    rope_theta=500_000.0,
    rms_eps=1e-6,
    max_positions=4096,
    qk_norm=True,
    whole_qk_norm=True,
    norms="after",
)

ARCHITECTURES: dict[str, Architecture] = {
    "mistral-7b": _MISTRAL_7B,
    "olmo2-7b": _OLMO2_7B,
    # allenai/Olmo-3-1025-7B, config.json
    "olmo3-7b": dataclasses.replace(
        _OLMO2_7B,
        family="olmo3",
        vocab_size=100_278,
        max_positions=65_536,
        rope_scaling=YarnScaling(
            factor=8.0,
            original_max_positions=8192,
            attention_factor=1.2079441541679836,
        ),
        windows=(4096, 4096, 4096, 0) * 8,
        window_rope=Rope(500_000.0),
    ),
    # google/gemma-2-2b, config.json
    "gemma2-2b": Architecture(
        family="gemma2",
        vocab_size=256_000,
        hidden_size=2304,
        ffn_size=9216,
        num_layers=26,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        rope_theta=10_000.0,
        rms_eps=1e-6,
        tied_embeddings=True,
        max_positions=8192,
        norms="both",
        norm_offset=1.0,
        activation="gelu_tanh",
        scaled_embeddings=True,
        windows=(4096, 0) * 13,
        attention_cap=50.0,
        logit_cap=30.0,
    ),
    # google/gemma-3-1b-pt, config.json
    "gemma3-1b": Architecture(
        family="gemma3_text",
        vocab_size=262_144,
        hidden_size=1152,
        ffn_size=6912,
        num_layers=26,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        rope_theta=1_000_000.0,
        rms_eps=1e-6,
        tied_embeddings=True,
        max_positions=32_768,
        qk_norm=True,
        norms="both",
        norm_offset=1.0,
        activation="gelu_tanh",
        scaled_embeddings=True,
        windows=(512, 512, 512, 512, 512, 0) * 4 + (512, 512),
        window_rope=Rope(10_000.0),
    ),
    # HuggingFaceTB/SmolLM3-3B, config.json
    "smollm3-3b": dataclasses.replace(
        _MISTRAL_7B,
        family="smollm3",
        vocab_size=128_256,
        hidden_size=2048,
        ffn_size=11_008,
        num_layers=36,
        num_heads=16,
        num_kv_heads=4,
        rope_theta=5_000_000.0,
        rms_eps=1e-6,
        tied_embeddings=True,
        max_positions=65_536,
        rotated=(True, True, True, False) * 9,
    ),
    # openai/gpt-oss-20b, config.json
    "gpt-oss-20b": dataclasses.replace(
        _MISTRAL_7B,
        family="gpt_oss",
        vocab_size=201_088,
        hidden_size=2880,
        ffn_size=2880,
        num_layers=24,
        num_heads=64,
        head_dim=64,
        rope_theta=150_000.0,
        rope_scaling=YarnScaling(
            factor=32.0, original_max_positions=4096, truncate=False
        ),
        max_positions=131_072,
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        windows=(128, 0) * 12,
        experts=Experts(count=32, top_k=4, gate="normalized", biased=True, clamp=7.0),
    ),
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
