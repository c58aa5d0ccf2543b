"""The fields of config.json and tensors that only mixtures of experts have.

Qwen3-MoE has a tensor per expert; Llama 4 and gpt-oss have one tensor for all experts,
and layers of two kinds.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from scalerl_jax.formats.reading import Fields
from scalerl_jax.model.architecture import Architecture, Experts, LocalLayers

# No family has its own bias in the choice: its tensor has DeepSeek-V3's name, and
# transformers ignores it.
_BIAS = "scalerl_router_bias"  # field of config.json, present if there is a bias
_NUMBERS = ("num_experts", "num_local_experts")  # transformers 5 may write either
COUNTS = (*_NUMBERS, "num_experts_per_tok", _BIAS)  # fields of every mixture


def text_fields(fields: Fields, name: str) -> Fields:
    """Return the fields of the decoder `name`, of a model that also reads images."""
    check_unquantized(fields)
    given = fields.values.get("text_config")
    if not isinstance(given, dict):
        raise fields.refuse("text_config", "it must be an object")
    return Fields(fields.file, {"model_type": name} | given, "text_config.")


def check_unquantized(fields: Fields) -> None:
    """Refuse a checkpoint of integers, or of other numbers that need scales."""
    if fields.values.get("quantization_config") is not None:
        raise fields.refuse(
            "quantization_config", "take the model's checkpoint in bfloat16"
        )


Gate = Literal["softmax", "normalized", "sigmoid"]


def _read_experts(fields: Fields, name: str, gate: Gate, **more: Any) -> Experts:
    """Return the experts, counted by the field `name` or by its other name."""
    if name not in fields.values:
        (name,) = set(_NUMBERS) - {name}
    count, top_k = fields.integer(name), fields.integer("num_experts_per_tok")
    if top_k > count:
        raise fields.refuse("num_experts_per_tok", f"there are {name} = {count}")
    bias = fields.values.get(_BIAS, False)
    if not isinstance(bias, bool):
        raise fields.refuse(_BIAS, "it must be true or false")
    return Experts(count, top_k, gate, bias=bias, **more)


def _expert_values(arch: Architecture, name: str) -> dict[str, Any]:
    """Return the fields of config.json that `_read_experts` reads."""
    experts = arch.experts
    assert experts is not None, "a mixture has experts"
    values = {name: experts.count, "num_experts_per_tok": experts.top_k}
    return values | ({_BIAS: True} if experts.bias else {})


def read_qwen3(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Return the `Architecture` fields of Qwen3 mixtures alone."""
    del num_layers
    fields.only("norm_topk_prob", (True, False))
    normalized = fields.values.get("norm_topk_prob")
    gate = "normalized" if normalized else "softmax"
    return {"experts": _read_experts(fields, "num_experts", gate)}


def write_qwen3(arch: Architecture) -> dict[str, Any]:
    """Return the fields of config.json that `read_qwen3` reads."""
    values = _expert_values(arch, "num_experts")
    assert arch.experts is not None
    return values | {
        "norm_topk_prob": arch.experts.gate == "normalized",
        "intermediate_size": arch.ffn_size,  # for layers without experts: unused
    }


def read_gpt_oss(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Return the `Architecture` fields of gpt-oss alone."""
    del num_layers
    limit = fields.number("swiglu_limit")
    given = fields.values.get("quantization_config") or {}
    if not isinstance(given, dict):
        raise fields.refuse("quantization_config", "it must be an object")
    Fields(fields.file, given, "quantization_config.").only("quant_method", ("mxfp4",))
    # A softmax of the chosen logits equals the softmax of all logits, normalised.
    experts = _read_experts(
        fields, "num_local_experts", "normalized", biased=True, clamp=limit
    )
    return {"experts": experts}


def write_gpt_oss(arch: Architecture) -> dict[str, Any]:
    """Return the fields of config.json that `read_gpt_oss` reads."""
    values = _expert_values(arch, "num_local_experts")
    assert arch.experts is not None
    return values | {"swiglu_limit": arch.experts.clamp}


def read_llama4(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Return the `Architecture` fields of Llama 4 alone."""
    experts = _read_experts(
        fields, "num_local_experts", "sigmoid", gate_input=True, shared=True
    )
    return {"experts": experts, "local": _read_local(fields, num_layers)}


def read_rotated(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have positions: 1 in no_rope_layers, or by the interval."""
    known = fields.values.get("no_rope_layers")
    if not known:
        interval = fields.integer("no_rope_layer_interval")
        known = [int(each % interval != 0) for each in range(1, num_layers + 1)]
    if not isinstance(known, list) or len(known) < num_layers or set(known) - {0, 1}:
        raise fields.refuse("no_rope_layers", "it must be a 0 or a 1 for each layer")
    return tuple(map(bool, known[:num_layers]))


def _read_local(fields: Fields, num_layers: int) -> LocalLayers:
    """Return the settings of Llama 4's layers with and without positions."""
    fields.only("moe_layers", ([*range(num_layers)],))
    tuned = fields.values.get("attn_temperature_tuning")
    local = LocalLayers(
        with_positions=read_rotated(fields, num_layers),
        chunk=fields.integer("attention_chunk_size"),
        normalized=bool(fields.values.get("use_qk_norm")),
        scale=fields.number("attn_scale") if tuned else 0.0,
        floor_positions=fields.integer("floor_scale"),
    )
    fields.only("layer_types", ([], _layer_types(local)))
    return local


def _layer_types(local: LocalLayers) -> list[str]:
    """Return the kinds of the layers by config.json's names."""
    kinds = {True: "chunked_attention", False: "full_attention"}
    return [kinds[near] for near in local.with_positions]


def write_llama4(arch: Architecture) -> dict[str, Any]:
    """Return the fields of config.json that `read_llama4` reads."""
    local = arch.local
    assert local is not None, "a Llama 4 has layers of two kinds"
    return _expert_values(arch, "num_local_experts") | {
        "moe_layers": [*range(arch.num_layers)],
        "no_rope_layers": [*map(int, local.with_positions)],
        "layer_types": _layer_types(local),
        "attention_chunk_size": local.chunk,
        "use_qk_norm": local.normalized,
        "attn_temperature_tuning": local.scale > 0,
        "attn_scale": local.scale,
        "floor_scale": local.floor_positions,
    }


def check_experts(
    stored: Mapping[str, Any], expected: Mapping[str, Any], count: int
) -> None:
    """Refuse experts in another layout, or another number of them.

    `stored` are a checkpoint's tensors by name; `expected` has the family's names.
    """
    of_one = re.compile(r"\.experts\.(\d+)\.")
    apart = any(of_one.search(name) for name in expected)
    for name, tensor in stored.items():
        number = of_one.search(name)
        if ".experts." in name and apart != bool(number):
            layouts = ("in one tensor per layer", "in a tensor each")
            raise ValueError(
                f"{tensor.file} has its experts {layouts[bool(number)]} "
                f"({tensor.name}); this family has them {layouts[apart]}: save it "
                f"again with save_pretrained of transformers"
            )
        if number and int(number[1]) >= count:
            raise ValueError(
                f"{tensor.file} holds tensor {tensor.name}, of an expert above "
                f"config.json's {count} experts"
            )
