"""Tiny models of each family, made and saved by transformers itself."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.model.transformer import abstract_params

_SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=None,
)
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
# Windows of a few tokens, of 100.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-untied": (
        "MistralConfig",
        dict(rope_parameters=_PLAIN_ROPE, sliding_window=9, head_dim=16),
    ),
    "mistral-tied-no-window": (
        "MistralConfig",
        dict(
            rope_parameters=_YARN_ROPE,
            sliding_window=None,
            tie_word_embeddings=True,
        ),
    ),
    "olmo2-untied": (
        "Olmo2Config",
        dict(rope_parameters=_PLAIN_ROPE, pad_token_id=None),
    ),
    "olmo3-tied": (
        "Olmo3Config",
        dict(
            rope_parameters={
                "full_attention": _YARN_ROPE | {"attention_factor": 1.3},
                "sliding_attention": _PLAIN_ROPE,
            },
            pad_token_id=None,
            num_hidden_layers=3,
            layer_types=_LAYERS,
            sliding_window=12,
            tie_word_embeddings=True,
        ),
    ),
    "gemma3-tied": (
        "Gemma3TextConfig",
        dict(
            rope_parameters={
                "full_attention": _PLAIN_ROPE
                | {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": _PLAIN_ROPE,
            },
            head_dim=16,
            pad_token_id=None,
            query_pre_attn_scalar=24,
            num_hidden_layers=3,
            layer_types=_LAYERS,
            sliding_window=10,
        ),
    ),
    "gemma3-untied": (
        "Gemma3TextConfig",
        dict(
            head_dim=16,
            pad_token_id=None,
            query_pre_attn_scalar=16,
            sliding_window=10,
            sliding_window_pattern=2,
            tie_word_embeddings=False,
        ),
    ),
    # Other than eager, transformers' attention leaves the caps of scores out.
    "gemma2-tied": (
        "Gemma2Config",
        dict(
            rope_parameters=_PLAIN_ROPE,
            head_dim=16,
            pad_token_id=None,
            query_pre_attn_scalar=24,
            sliding_window=10,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            attn_implementation="eager",
        ),
    ),
    "gemma2-untied-no-caps": (
        "Gemma2Config",
        dict(
            rope_parameters=_PLAIN_ROPE,
            head_dim=16,
            pad_token_id=None,
            query_pre_attn_scalar=16,
            num_hidden_layers=3,
            layer_types=_LAYERS,
            sliding_window=10,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            tie_word_embeddings=False,
        ),
    ),
    "llama-biases": (
        "LlamaConfig",
        dict(
            rope_parameters=_PLAIN_ROPE,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        ),
    ),
    "smollm3-tied": (
        "SmolLM3Config",
        dict(
            rope_parameters=_PLAIN_ROPE,
            pad_token_id=None,
            num_hidden_layers=3,
            no_rope_layer_interval=2,
        ),
    ),
    "smollm3-untied": (
        "SmolLM3Config",
        dict(
            rope_parameters=_PLAIN_ROPE,
            pad_token_id=None,
            no_rope_layers=[0, 1],
            tie_word_embeddings=False,
        ),
    ),
    "gpt-oss": (
        "GptOssConfig",
        dict(
            rope_parameters=_YARN_ROPE | {"truncate": False, "beta_fast": 32.0},
            head_dim=16,
            pad_token_id=None,
            num_hidden_layers=3,
            layer_types=_LAYERS,
            sliding_window=11,
            num_local_experts=5,
            num_experts_per_tok=2,
            swiglu_limit=1.0,
        ),
    ),
    "llama3-untied": (
        "LlamaConfig",
        dict(rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=False),
    ),
    "llama3.2-tied": (
        "LlamaConfig",
        dict(
            rope_parameters=_LLAMA3_ROPE | {"factor": 32.0},
            tie_word_embeddings=True,
            head_dim=16,
        ),
    ),
    # The odd numbers of heads of the 135M model.
    "smollm2-tied": (
        "LlamaConfig",
        dict(
            rope_parameters=_PLAIN_ROPE | {"rope_theta": 100_000.0},
            tie_word_embeddings=True,
            hidden_size=72,
            num_attention_heads=9,
            num_key_value_heads=3,
        ),
    ),
    "qwen2-untied": (
        "Qwen2Config",
        dict(rope_parameters=_PLAIN_ROPE, tie_word_embeddings=False),
    ),
    "qwen2-tied": (
        "Qwen2Config",
        dict(rope_parameters=_PLAIN_ROPE, tie_word_embeddings=True),
    ),
    "qwen3-untied": (
        "Qwen3Config",
        dict(rope_parameters=_PLAIN_ROPE, tie_word_embeddings=False, head_dim=16),
    ),
    "qwen3-tied": (
        "Qwen3Config",
        dict(rope_parameters=_PLAIN_ROPE, tie_word_embeddings=True, head_dim=16),
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        dict(
            rope_parameters=_PLAIN_ROPE,
            head_dim=16,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
        ),
    ),
    "qwen3-moe-not-normalized": (
        "Qwen3MoeConfig",
        dict(
            rope_parameters=_PLAIN_ROPE,
            tie_word_embeddings=True,
            num_experts=4,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            norm_topk_prob=False,
        ),
    ),
    # 100 tokens in chunks of 16, temperatures that grow every 8.
    "llama4": (
        "Llama4TextConfig",
        dict(
            rope_parameters=_LLAMA3_ROPE,
            head_dim=16,
            pad_token_id=None,
            num_local_experts=4,
            num_experts_per_tok=1,
            no_rope_layers=[1, 0],
            attention_chunk_size=16,
            floor_scale=8,
            attn_scale=0.3,
        ),
    ),
    "llama4-plain": (
        "Llama4TextConfig",
        dict(
            rope_parameters=_PLAIN_ROPE,
            head_dim=16,
            pad_token_id=None,
            num_local_experts=3,
            num_experts_per_tok=2,
            no_rope_layer_interval=2,
            use_qk_norm=False,
            attn_temperature_tuning=False,
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class HuggingFaceModel:
    """A float32 model of transformers, and where it is saved."""

    model: Any  # transformers.PreTrainedModel
    directory: Path

    def logits(self, tokens: list[int]) -> Any:
        """What transformers computes for one row, [S, V]."""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].numpy()


@pytest.fixture(scope="session")
def random_params():
    """Makes parameters with every norm and bias away from its start; no compiling."""

    def make(arch, dtype="float32", std=0.3):
        rng = np.random.default_rng(0)
        return jax.tree.map(
            lambda leaf: jnp.asarray(std * rng.normal(size=leaf.shape), leaf.dtype),
            abstract_params(arch, dtype=jnp.dtype(dtype)),
        )

    return make


@pytest.fixture(scope="session", params=CASES)
def hugging_face(request, tmp_path_factory) -> HuggingFaceModel:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    name, settings = CASES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**_SIZES | settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # transformers starts biases at 0, norms at 1: too easy
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.3)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return HuggingFaceModel(model, directory)
