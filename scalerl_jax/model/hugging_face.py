"""Decoders as Hugging Face writes them down: config.json, and names of tensors.

A `Family` holds both, for reading and for writing (`saving`).  Whatever the forward
pass would not honour (sliding windows, other rotary scalings, quantised weights) is
refused, never dropped.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from scalerl_jax.formats.model_files import local_path
from scalerl_jax.formats.reading import Fields, read_json
from scalerl_jax.model.architecture import Architecture, FamilyName, RopeScaling
from scalerl_jax.model.mixture_files import MIXTURES, read_mixture, text_fields

CONFIG_FILE = "config.json"
# Ends of the names of tensors that hold no parameter.
IGNORED = ("rotary_emb.inv_freq",)
# Beginnings of the names of tensors in a checkpoint that also reads images: of those
# that hold the decoder, and of those that a decoder has no use for.
TEXT, IMAGES = "language_model.", ("vision_model.", "multi_modal_projector.")
# Parameter -> the tensors that hold it, one per layer where they have {layer}.
_DECODER = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
} | {
    f"layers/{name}": f"model.layers.{{layer}}.{tensor}"
    for name, tensor in {
        "attention_norm": "input_layernorm.weight",
        "query": "self_attn.q_proj.weight",
        "key": "self_attn.k_proj.weight",
        "value": "self_attn.v_proj.weight",
        "output": "self_attn.o_proj.weight",
        "query_bias": "self_attn.q_proj.bias",
        "key_bias": "self_attn.k_proj.bias",
        "value_bias": "self_attn.v_proj.bias",
        "query_norm": "self_attn.q_norm.weight",
        "key_norm": "self_attn.k_norm.weight",
        "ffn_norm": "post_attention_layernorm.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
    }.items()
}


@dataclasses.dataclass(frozen=True)
class Family:
    """Form of the decoders of one model_type."""

    loader: str  # class that transformers loads them into
    tensors: Mapping[str, str]  # parameter -> pattern of its tensors' names
    fixed: Mapping[str, Any]  # fields of config.json that must say just this
    qkv_bias: bool = False  # as in an `Architecture`
    qk_norm: bool = False
    own_head_dim: bool = False  # config.json must say it: no quotient of two others
    experts: str = ""  # field of config.json that counts them
    sizes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # see `SIZES`
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# Families without experts; `mixture_files.MIXTURES` has the others.
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", _DECODER, {"attention_bias": False, "mlp_bias": False}
    ),
    # It has its biases whatever attention_bias says.
    "qwen2": Family(
        "Qwen2ForCausalLM", _DECODER, {"use_sliding_window": False}, qkv_bias=True
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _DECODER,
        {"attention_bias": False, "use_sliding_window": False},
        qk_norm=True,
        own_head_dim=True,
    ),
}
_MOST_LAYERS = 2**14  # a file that says more is broken
# Field of an `Architecture`, or of its `RopeScaling` -> field of config.json.
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
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}
# Fields whose other values change any forward pass.  Absent and null are fine.
_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "use_sliding_window": (False,),
    "quantization_config": (),
}


def find_family(name: FamilyName) -> Family:
    """Return the form of the decoders of a model_type."""
    if name in FAMILIES:
        return FAMILIES[name]

    form = MIXTURES[name]
    return Family(**form | {"tensors": _DECODER | form["tensors"]})


def read_architecture(checkpoint: str | Path) -> Architecture:
    """The architecture of a Hugging Face directory or hub id, or of a GGUF file.

    Raises:
        ValueError: names the field whose value the forward pass does not support.
    """
    file = local_path(checkpoint) / CONFIG_FILE
    if not file.exists():
        raise ValueError(
            f"{file} does not exist; name a Hugging Face directory or a GGUF file"
        )
    fields = _decoder_fields(file)
    name: Any = fields.values["model_type"]
    family = find_family(name)
    num_heads = fields.integer("num_attention_heads")
    defaults = {"num_kv_heads": num_heads}
    if not family.own_head_dim:
        defaults["head_dim"] = fields.integer("hidden_size") // num_heads
    fields.integer("num_hidden_layers", most=_MOST_LAYERS)
    sizes: dict[str, Any] = {
        size: fields.integer(theirs, defaults.get(size))
        for size, theirs in {**SIZES, **family.sizes}.items()
    }
    experts = local = None
    if family.experts:
        experts, local = read_mixture(fields, name, sizes["num_layers"])
    kinds = fields.values.get("layer_types") or []
    if local is None and (
        not isinstance(kinds, list) or set(map(str, kinds)) - {"full_attention"}
    ):
        raise fields.refuse("layer_types", "only 'full_attention' in every layer is")
    if num_heads % sizes["num_kv_heads"]:
        raise fields.refuse(
            "num_key_value_heads", f"it must divide num_attention_heads = {num_heads}"
        )
    if sizes["head_dim"] % 2:
        raise fields.refuse(
            "head_dim", f"rotary positions need it even: {sizes['head_dim']}"
        )
    rope_theta, rope_scaling = _read_rope(fields)
    return Architecture(
        family=name,
        rope_theta=rope_theta,
        rms_eps=fields.number("rms_norm_eps"),
        tied_embeddings=bool(fields.values.get("tie_word_embeddings", False)),
        rope_scaling=rope_scaling,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        experts=experts,
        local=local,
        **sizes,
    )


def _decoder_fields(file: Any) -> Fields:
    """The fields of a decoder that is known, and its defaults; others are refused."""
    fields = Fields(file, read_json(file))
    if fields.values.get("model_type") == "llama4":
        fields = text_fields(fields)
    name: Any = fields.values.get("model_type")
    if name not in (names := sorted(get_args(FamilyName))):
        raise fields.refuse("model_type", f"choose from {names}")
    family = find_family(name)
    fields = fields.with_defaults(family.defaults)
    fixed = {field: (value,) for field, value in family.fixed.items()}
    for field, allowed in (_ONLY_VALUES | fixed).items():
        fields.only(field, allowed)
    return fields


def _read_rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from rope_theta and rope_scaling, or from rope_parameters.

    transformers 5 writes rope_parameters, which holds both; older ones and most
    published checkpoints have the two apart, some with "type" for "rope_type".
    """
    section = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    given = fields.values.get(section) or {}
    if not isinstance(given, dict):
        raise fields.refuse(section, "it must be an object")
    rope = Fields(fields.file, given, prefix=f"{section}.")
    rope.only("partial_rotary_factor", (1.0,))
    theta = (rope if "rope_theta" in given else fields).number("rope_theta")
    kind_field = "rope_type" if "rope_type" in given else "type"
    kind = given.get(kind_field, "default")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise rope.refuse(kind_field, "choose from ['default', 'llama3']")
    numbers: dict[str, Any] = {
        name: rope.number(theirs) for name, theirs in SCALING.items()
    }
    numbers["original_max_positions"] = rope.integer(SCALING["original_max_positions"])
    return theta, RopeScaling(**numbers)
