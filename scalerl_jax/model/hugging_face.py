"""Decoders as Hugging Face writes them down: config.json, and names of tensors.

`FAMILIES` holds both, for reading and for writing (`saving`).  Whatever the forward
pass would not honour (sliding windows, other rotary scalings, quantised weights) is
refused, never dropped.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl_jax.model.architecture import (
    Architecture,
    Experts,
    LocalLayers,
    RopeScaling,
)
from scalerl_jax.utils.reading import local_path, read_json

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
# A tensor per expert, or with {expert} missing one of all of them, [expert, in, out].
_QWEN3_MOE = _DECODER | {
    f"layers/{name}": f"model.layers.{{layer}}.mlp.{tensor}.weight"
    for name, tensor in {
        "router": "gate",
        "expert_gate_up": "experts.{expert}.{side}_proj",
        "expert_down": "experts.{expert}.down_proj",
    }.items()
}
# A family has none of its own: the name is DeepSeek-V3's, and transformers leaves it.
BIAS = "scalerl_router_bias"  # field of config.json, there where there is one
_QWEN3_MOE["layers/router_bias"] = (
    "model.layers.{layer}.mlp.gate.e_score_correction_bias"
)
_LLAMA4 = _DECODER | {
    f"layers/{name}": f"model.layers.{{layer}}.feed_forward.{tensor}"
    for name, tensor in {
        "router": "router.weight",
        "router_bias": "router.e_score_correction_bias",
        "expert_gate_up": "experts.gate_up_proj",
        "expert_down": "experts.down_proj",
        "shared_gate": "shared_expert.gate_proj.weight",
        "shared_up": "shared_expert.up_proj.weight",
        "shared_down": "shared_expert.down_proj.weight",
    }.items()
}


@dataclasses.dataclass(frozen=True)
class Family:
    """Form of the decoders of one model_type."""

    loader: str  # class that transformers loads them into
    tensors: Mapping[str, str]  # parameter -> pattern of its tensors' names
    fixed: Mapping[str, Any]  # fields of config.json that must say just this
    experts: str = ""  # field of config.json that counts them
    sizes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # see `SIZES`
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", _DECODER, {"attention_bias": False, "mlp_bias": False}
    ),
    # It has its biases whatever attention_bias says.
    "qwen2": Family("Qwen2ForCausalLM", _DECODER, {"use_sliding_window": False}),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _DECODER,
        {"attention_bias": False, "use_sliding_window": False},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _QWEN3_MOE,
        {
            "attention_bias": False,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        experts="num_experts",
        sizes={"ffn_size": "moe_intermediate_size"},
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        _LLAMA4,
        {"attention_bias": False, "interleave_moe_layer_step": 1},
        experts="num_local_experts",
        defaults={  # of transformers: published files leave some of them out
            "attention_chunk_size": 8192,
            "attn_scale": 0.1,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "no_rope_layer_interval": 4,
            "use_qk_norm": True,
        },
    ),
}
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
# No field is larger, nor has a model more layers: such a file is broken.
_MOST, _LAYERS = 2**28, 2**14


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Fields of a file; errors name it, the field and the value."""

    file: object  # as errors name it
    values: dict[str, Any]
    prefix: str = ""

    def refuse(self, name: str, supported: str) -> ValueError:
        """The error for a field; `supported` says what would do."""
        value = self.values.get(name)
        shown = "is missing" if value is None else f"= {value!r} is not supported"
        return ValueError(f"{self.file}: {self.prefix}{name} {shown}; {supported}")

    def integer(self, name: str, default: int | None = None) -> int:
        """One from 1 to the largest that a model has."""
        value = self.values.get(name)
        value = default if value is None else value
        most = _LAYERS if name == "num_hidden_layers" else _MOST
        if type(value) is not int or not 1 <= value <= most:
            raise self.refuse(name, f"it must be an integer from 1 to {most}")
        return value

    def with_defaults(self, defaults: Mapping[str, Any]) -> "_Fields":
        """The fields, and defaults of those that are absent or null."""
        given = {name: each for name, each in self.values.items() if each is not None}
        return dataclasses.replace(self, values=dict(defaults) | given)

    def number(self, name: str) -> float:
        """A finite one above 0."""
        value: Any = self.values.get(name)
        if type(value) not in (int, float) or not 0 < value < sys.float_info.max:
            raise self.refuse(name, "it must be a number above 0")
        return float(value)

    def only(self, name: str, allowed: Sequence[Any]) -> None:
        """Refuse a value that is there and not allowed."""
        if self.values.get(name) is not None and self.values[name] not in allowed:
            choice = f"only {list(allowed)} is" if allowed else "remove it, no value is"
            raise self.refuse(name, choice)


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
    fields = _text_fields(_Fields(file, read_json(file)))
    family: Any = fields.values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise fields.refuse("model_type", f"choose from {sorted(FAMILIES)}")
    fields = fields.with_defaults(FAMILIES[family].defaults)
    fixed = {name: (value,) for name, value in FAMILIES[family].fixed.items()}
    for name, allowed in (_ONLY_VALUES | fixed).items():
        fields.only(name, allowed)
    num_heads = fields.integer("num_attention_heads")
    defaults = {"num_kv_heads": num_heads}
    if family != "qwen3":
        defaults["head_dim"] = fields.integer("hidden_size") // num_heads
    sizes: dict[str, Any] = {
        name: fields.integer(theirs, defaults.get(name))
        for name, theirs in {**SIZES, **FAMILIES[family].sizes}.items()
    }
    local = None
    if family == "llama4_text":
        local = _read_local(fields, sizes["num_layers"])
    _check_layer_types(fields, local)
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
        family=family,  # type: ignore[arg-type]
        rope_theta=rope_theta,
        rms_eps=fields.number("rms_norm_eps"),
        tied_embeddings=bool(fields.values.get("tie_word_embeddings", False)),
        rope_scaling=rope_scaling,
        experts=_read_experts(fields, FAMILIES[family]),
        local=local,
        **sizes,
    )


def _text_fields(fields: _Fields) -> _Fields:
    """The fields of the decoder, of a file that may also be of what reads images."""
    if fields.values.get("model_type") != "llama4":
        return fields
    fields.only("quantization_config", ())
    given = fields.values.get("text_config")
    if not isinstance(given, dict):
        raise fields.refuse("text_config", "it must be an object")
    return _Fields(fields.file, {"model_type": "llama4_text"} | given, "text_config.")


def _read_experts(fields: _Fields, family: Family) -> Experts | None:
    """The experts that config.json describes; None: it is of no mixture."""
    if not family.experts:
        return None
    # transformers 5 may write either name.
    other = {"num_experts", "num_local_experts"} - {family.experts}
    name = family.experts if family.experts in fields.values else other.pop()
    count, top_k = fields.integer(name), fields.integer("num_experts_per_tok")
    if top_k > count:
        raise fields.refuse("num_experts_per_tok", f"there are {name} = {count}")
    bias = fields.values.get(BIAS, False)
    if not isinstance(bias, bool):
        raise fields.refuse(BIAS, "it must be true or false")
    if family.loader == "Llama4ForCausalLM":
        return Experts(count, top_k, "sigmoid", gate_input=True, shared=True, bias=bias)
    fields.only("norm_topk_prob", (True, False))
    normalized = fields.values.get("norm_topk_prob")
    return Experts(count, top_k, "normalized" if normalized else "softmax", bias=bias)


def _read_local(fields: _Fields, num_layers: int) -> LocalLayers:
    """The layers of a Llama 4 that know positions, and what follows from that."""
    every_layer = [*range(num_layers)]
    fields.only("moe_layers", (every_layer,))
    given = fields.values.get("no_rope_layers") or []
    interval = fields.integer("no_rope_layer_interval")
    known = given or [int((layer + 1) % interval != 0) for layer in every_layer]
    if not isinstance(known, list) or len(known) < num_layers or set(known) - {0, 1}:
        raise fields.refuse("no_rope_layers", "it must be a 0 or a 1 for each layer")
    tuned = fields.values["attn_temperature_tuning"]
    return LocalLayers(
        with_positions=tuple(map(bool, known[:num_layers])),
        chunk=fields.integer("attention_chunk_size"),
        normalized=bool(fields.values["use_qk_norm"]),
        scale=fields.number("attn_scale") if tuned else 0.0,
        floor_positions=fields.integer("floor_scale"),
    )


def layer_types(local: LocalLayers) -> list[str]:
    """Kinds of the layers, as config.json names them."""
    kinds = {True: "chunked_attention", False: "full_attention"}
    return [kinds[near] for near in local.with_positions]


def _check_layer_types(fields: _Fields, local: LocalLayers | None) -> None:
    """Refuse layers of a kind that the forward pass does not have."""
    given = fields.values.get("layer_types") or []
    if local is not None:
        fields.only("layer_types", ([], layer_types(local)))
    elif not isinstance(given, list) or set(map(str, given)) - {"full_attention"}:
        raise fields.refuse("layer_types", "only 'full_attention' in every layer is")


def _read_rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from rope_theta and rope_scaling, or from rope_parameters.

    transformers 5 writes rope_parameters, which holds both; older ones and most
    published checkpoints have the two apart, some with "type" for "rope_type".
    """
    section = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    given = fields.values.get(section) or {}
    if not isinstance(given, dict):
        raise fields.refuse(section, "it must be an object")
    rope = _Fields(fields.file, given, prefix=f"{section}.")
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
