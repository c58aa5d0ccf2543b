"""Families of decoders as tables: names of tensors, fields of config.json, features.

No other module branches on a family's name.  A `Family` determines how checkpoints of a
model_type are read and written; the computation is in fields of `Architecture`.

The file is above 400 lines: families are read side by side, with all their defaults.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from scalerl_jax.formats.reading import Fields
from scalerl_jax.model import mixture_files as mixtures
from scalerl_jax.model.architecture import Architecture, FamilyName

# Parameter -> the tensors that hold it, one per layer if the name has {layer}.
_WHOLE = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}


def _of_layers(tensors: Mapping[str, str], within: str = "") -> dict[str, str]:
    return {
        f"layers/{name}": f"model.layers.{{layer}}.{within}{tensor}"
        for name, tensor in tensors.items()
    }


_ATTENTION = _of_layers(
    {
        "query": "q_proj.weight",
        "key": "k_proj.weight",
        "value": "v_proj.weight",
        "output": "o_proj.weight",
        "query_bias": "q_proj.bias",
        "key_bias": "k_proj.bias",
        "value_bias": "v_proj.bias",
        "output_bias": "o_proj.bias",
        "query_norm": "q_norm.weight",
        "key_norm": "k_norm.weight",
        "sinks": "sinks",
    },
    "self_attn.",
)
_GATED = _of_layers(
    {
        "gate": "gate_proj.weight",
        "up": "up_proj.weight",
        "down": "down_proj.weight",
        "gate_bias": "gate_proj.bias",
        "up_bias": "up_proj.bias",
        "down_bias": "down_proj.bias",
    },
    "mlp.",
)
_NORMS_BEFORE = _of_layers(
    {
        "attention_norm": "input_layernorm.weight",
        "ffn_norm": "post_attention_layernorm.weight",
    }
)
_NORMS_AFTER = _of_layers(
    {
        "attention_out_norm": "post_attention_layernorm.weight",
        "ffn_out_norm": "post_feedforward_layernorm.weight",
    }
)
_NORMS_BOTH = _NORMS_AFTER | _of_layers(
    {
        "attention_norm": "input_layernorm.weight",
        "ffn_norm": "pre_feedforward_layernorm.weight",
    }
)
_BEFORE = _WHOLE | _ATTENTION | _GATED | _NORMS_BEFORE
_AFTER = _WHOLE | _ATTENTION | _GATED | _NORMS_AFTER
_BOTH = _WHOLE | _ATTENTION | _GATED | _NORMS_BOTH

Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """The checkpoint format of the decoders of one model_type."""

    loader: str  # class of transformers for them
    tensors: Mapping[str, str]  # parameter -> pattern of its tensors' names
    fixed: Values  # fields of config.json that must have these values
    models: str = ""  # published models, for the docs
    features: Values = dataclasses.field(default_factory=dict)  # of an `Architecture`
    own_head_dim: bool = False  # config.json must have head_dim: it is no quotient
    sizes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # see `SIZES`
    # Values of fields that config.json leaves out, as in transformers, unlike null.
    defaults: Values = dataclasses.field(default_factory=dict)
    idle: tuple[str, ...] = ()  # fields without effect, since others are fixed
    # Layers that see a window of tokens (sliding_window): "all", or those in
    # layer_types, by default all except every n-th (n: this number); None: no layer.
    windows: int | str | None = None
    window_theta: str = ""  # field with theta of layers with windows; "": as others
    some_rotated: bool = False  # no_rope_layers names the layers with positions
    scale_field: str = ""  # attention_scale is its value ^ -0.5
    # Fields, true or false -> the biases that the layers then have.
    biases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    caps: bool = False  # it has the fields of `CAPS`
    # Mixtures: functions that read and write fields of an `Architecture`, and the
    # fields of config.json for them.
    read: Callable[[Fields, int], dict[str, Any]] | None = None
    write: Callable[[Architecture], dict[str, Any]] | None = None
    known: tuple[str, ...] = ()
    interleaved: bool = False  # an expert's gates and ups alternate in their tensor


_OLMO2 = Family(
    "Olmo2ForCausalLM",
    _AFTER,
    {"attention_bias": False},
    "OLMo 2",
    {"norms": "after", "qk_norm": True, "whole_qk_norm": True},
)
_NO_WINDOW = {"use_sliding_window": False}
_IDLE_WINDOW = ("sliding_window", "max_window_layers")
_ATTENTION_BIAS = {"attention_bias": ("qkv_bias", "output_bias")}
_GEMMA = {
    "norms": "both",
    "norm_offset": 1.0,
    "activation": "gelu_tanh",
    "scaled_embeddings": True,
}

FAMILIES: dict[FamilyName, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        _BEFORE,
        {},
        "Llama 3 to 3.3, SmolLM2",
        biases=_ATTENTION_BIAS | {"mlp_bias": ("ffn_bias",)},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _BEFORE,
        {},
        "Mistral 7B, Mistral Nemo",
        windows="all",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    # It has biases, whatever the value of attention_bias.
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _BEFORE,
        _NO_WINDOW,
        "Qwen2, Qwen2.5",
        {"qkv_bias": True},
        idle=(*_IDLE_WINDOW, "attention_bias"),
        defaults={"num_key_value_heads": 32},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _BEFORE,
        {"attention_bias": False, **_NO_WINDOW},
        "Qwen3",
        {"qk_norm": True},
        own_head_dim=True,
        idle=_IDLE_WINDOW,
        defaults={"num_key_value_heads": 32},
    ),
    "olmo2": _OLMO2,
    "olmo3": dataclasses.replace(
        _OLMO2,
        loader="Olmo3ForCausalLM",
        models="OLMo 3",
        windows=4,
        window_theta="rope_theta",
        defaults={"rope_theta": 500_000.0},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _BOTH,
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": "gelu_pytorch_tanh",  # published files have both
            "attention_bias": False,
            "use_bidirectional_attention": False,
        },
        "Gemma 2",
        _GEMMA,
        windows=2,
        scale_field="query_pre_attn_scalar",
        caps=True,
        defaults={
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _BOTH,
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        "Gemma 3",
        _GEMMA | {"qk_norm": True},
        windows=6,
        window_theta="rope_local_base_freq",
        scale_field="query_pre_attn_scalar",
        defaults={  # published files leave some of them out
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _BEFORE,
        {"attention_bias": False, "mlp_bias": False, **_NO_WINDOW},
        "SmolLM3",
        some_rotated=True,
        defaults={
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        idle=_IDLE_WINDOW,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _BEFORE
        | _of_layers(
            {
                "router": "gate.weight",
                "router_bias": "gate.e_score_correction_bias",
                "expert_gate_up": "experts.{expert}.{side}_proj.weight",
                "expert_down": "experts.{expert}.down_proj.weight",
            },
            "mlp.",
        ),
        {
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **_NO_WINDOW,
        },
        "Qwen3 mixtures",
        {"qk_norm": True},
        sizes={"ffn_size": "moe_intermediate_size"},
        defaults={"num_key_value_heads": 4},
        # intermediate_size is for layers without experts, and all layers have them.
        idle=(*_IDLE_WINDOW, "intermediate_size"),
        read=mixtures.read_qwen3,
        write=mixtures.write_qwen3,
        known=("norm_topk_prob", *mixtures.COUNTS),
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        _BEFORE
        | _of_layers(
            {
                "router": "router.weight",
                "router_bias": "router.e_score_correction_bias",
                "expert_gate_up": "experts.gate_up_proj",
                "expert_down": "experts.down_proj",
                "shared_gate": "shared_expert.gate_proj.weight",
                "shared_up": "shared_expert.up_proj.weight",
                "shared_down": "shared_expert.down_proj.weight",
            },
            "feed_forward.",
        ),
        {"attention_bias": False, "interleave_moe_layer_step": 1},
        "Llama 4",
        idle=("intermediate_size_mlp", "for_llm_compressor"),
        defaults={  # published files leave some of them out
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_chunk_size": 8192,
            "attn_scale": 0.1,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "no_rope_layer_interval": 4,
            "use_qk_norm": True,
        },
        read=mixtures.read_llama4,
        write=mixtures.write_llama4,
        known=("moe_layers", "no_rope_layers", "layer_types", *mixtures.COUNTS),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _BEFORE
        | _of_layers(
            {
                "router": "router.weight",
                "router_logit_bias": "router.bias",
                "router_bias": "router.e_score_correction_bias",
                "expert_gate_up": "experts.gate_up_proj",
                "expert_gate_up_bias": "experts.gate_up_proj_bias",
                "expert_down": "experts.down_proj",
                "expert_down_bias": "experts.down_proj_bias",
            },
            "mlp.",
        ),
        {"attention_bias": True, "swiglu_alpha": 1.702},
        "gpt-oss",
        {"qkv_bias": True, "output_bias": True, "sinks": True},
        windows=2,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        # These two repeat other fields.
        idle=("initial_context_length", "experts_per_token"),
        read=mixtures.read_gpt_oss,
        write=mixtures.write_gpt_oss,
        known=("swiglu_limit", "quantization_config", *mixtures.COUNTS),
        interleaved=True,
    ),
}

# Fields of an `Architecture` that depend on the family alone.
FEATURES = frozenset(name for each in FAMILIES.values() for name in each.features)
# Field of an `Architecture` -> field of config.json.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
}
# Field of config.json -> field of an `Architecture`; null: 0, no cap.
CAPS = {
    "attn_logit_softcapping": "attention_cap",
    "final_logit_softcapping": "logit_cap",
}
# Fields whose other values would change the forward pass.  Absent and null are fine.
ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "use_sliding_window": (False,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "attention_dropout": (0.0,),
    "router_jitter_noise": (0.0,),
}
# Fields that change no forward pass: names, tokens, initialisation, sampling, saving.
IGNORED_FIELDS = frozenset(
    """
    _attn_implementation_autoset _name_or_path architectures attn_implementation
    bad_words_ids begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label initializer_range is_decoder is_llama_config label2id
    length_penalty max_length min_length model_type no_repeat_ngram_size
    num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty
    return_dict return_dict_in_generate router_aux_loss_coef sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config transformers_version typical_p unsloth_fixed
    unsloth_version use_bfloat16 use_cache
    """.split()
)
_WINDOWS = ("sliding_window", "layer_types")
_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


def find_family(name: FamilyName) -> Family:
    """Return the checkpoint format of a model_type."""
    return FAMILIES[name]


def known_fields(family: Family) -> frozenset[str]:
    """Return the fields of config.json that are used, or have no effect."""
    read = [*SIZES.values(), *family.sizes.values(), *_ROPE]
    read += ["rms_norm_eps", "tie_word_embeddings", "layer_types"]
    read += [*ONLY_VALUES, *family.fixed, *family.defaults, *family.idle, *family.known]
    read += [family.scale_field, family.window_theta, *family.biases]
    read += CAPS if family.caps else ()
    read += _WINDOWS if family.windows else ()
    read += _PATTERN if isinstance(family.windows, int) else ()
    read += ["no_rope_layers"] if family.some_rotated else []
    return IGNORED_FIELDS | set(read)
