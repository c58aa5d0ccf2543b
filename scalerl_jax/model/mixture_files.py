"""Mixtures of experts as Hugging Face writes them down, beyond what all decoders share.

Qwen3-MoE has a tensor per expert; Llama 4 has one of all of them, and layers of two
kinds.
"""

import re
from collections.abc import Mapping
from typing import Any

from scalerl_jax.formats.reading import Fields
from scalerl_jax.model.architecture import Architecture, Experts, LocalLayers

# No family has a bias of its own: DeepSeek-V3's names stand for it, and transformers
# leaves it out.
_BIAS = "scalerl_router_bias"  # field of config.json, there where there is one
# Arguments of `hugging_face.Family` by model_type; "tensors" are those of the experts,
# and of the parameters with {expert} there is a tensor each.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "loader": "Qwen3MoeForCausalLM",
        "qk_norm": True,
        "tensors": {
            f"layers/{name}": f"model.layers.{{layer}}.mlp.{tensor}"
            for name, tensor in {
                "router": "gate.weight",
                "router_bias": "gate.e_score_correction_bias",
                "expert_gate_up": "experts.{expert}.{side}_proj.weight",
                "expert_down": "experts.{expert}.down_proj.weight",
            }.items()
        },
        "fixed": {
            "attention_bias": False,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        "experts": "num_experts",
        "sizes": {"ffn_size": "moe_intermediate_size"},
    },
    "llama4_text": {
        "loader": "Llama4ForCausalLM",
        "tensors": {
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
        },
        "fixed": {"attention_bias": False, "interleave_moe_layer_step": 1},
        "experts": "num_local_experts",
        "defaults": {  # of transformers: published files leave some of them out
            "attention_chunk_size": 8192,
            "attn_scale": 0.1,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "no_rope_layer_interval": 4,
            "use_qk_norm": True,
        },
    },
}


def text_fields(fields: Fields) -> Fields:
    """Return the fields of the decoder, of a Llama 4 that also reads images."""
    fields.only("quantization_config", ())
    given = fields.values.get("text_config")
    if not isinstance(given, dict):
        raise fields.refuse("text_config", "it must be an object")
    return Fields(fields.file, {"model_type": "llama4_text"} | given, "text_config.")


def read_mixture(
    fields: Fields, family: str, num_layers: int
) -> tuple[Experts, LocalLayers | None]:
    """Read the experts that config.json describes, and the layers of a Llama 4."""
    # transformers 5 may write either name.
    name = MIXTURES[family]["experts"]
    if name not in fields.values:
        (name,) = {"num_experts", "num_local_experts"} - {name}
    count, top_k = fields.integer(name), fields.integer("num_experts_per_tok")
    if top_k > count:
        raise fields.refuse("num_experts_per_tok", f"there are {name} = {count}")
    bias = fields.values.get(_BIAS, False)
    if not isinstance(bias, bool):
        raise fields.refuse(_BIAS, "it must be true or false")
    if family == "llama4_text":
        return (
            Experts(count, top_k, "sigmoid", gate_input=True, shared=True, bias=bias),
            _read_local(fields, num_layers),
        )
    fields.only("norm_topk_prob", (True, False))
    normalized = fields.values.get("norm_topk_prob")
    gate = "normalized" if normalized else "softmax"
    return Experts(count, top_k, gate, bias=bias), None


def _read_local(fields: Fields, num_layers: int) -> LocalLayers:
    """Read the layers of a Llama 4 that know positions, and what follows from that."""
    every_layer = [*range(num_layers)]
    fields.only("moe_layers", (every_layer,))
    given = fields.values.get("no_rope_layers") or []
    interval = fields.integer("no_rope_layer_interval")
    known = given or [int((layer + 1) % interval != 0) for layer in every_layer]
    if not isinstance(known, list) or len(known) < num_layers or set(known) - {0, 1}:
        raise fields.refuse("no_rope_layers", "it must be a 0 or a 1 for each layer")
    tuned = fields.values["attn_temperature_tuning"]
    local = LocalLayers(
        with_positions=tuple(map(bool, known[:num_layers])),
        chunk=fields.integer("attention_chunk_size"),
        normalized=bool(fields.values["use_qk_norm"]),
        scale=fields.number("attn_scale") if tuned else 0.0,
        floor_positions=fields.integer("floor_scale"),
    )
    fields.only("layer_types", ([], _layer_types(local)))
    return local


def _layer_types(local: LocalLayers) -> list[str]:
    """Kinds of the layers, as config.json names them."""
    kinds = {True: "chunked_attention", False: "full_attention"}
    return [kinds[near] for near in local.with_positions]


def mixture_values(arch: Architecture, experts: Experts) -> dict[str, Any]:
    """Fields of config.json that `read_mixture` reads back."""
    values: dict[str, Any] = {
        MIXTURES[arch.family]["experts"]: experts.count,
        "num_experts_per_tok": experts.top_k,
    }
    if experts.bias:
        values[_BIAS] = True
    local = arch.local
    if local is None:
        return values | {
            "norm_topk_prob": experts.gate == "normalized",
            "intermediate_size": arch.ffn_size,  # of a layer without experts: none
        }
    return values | {
        "moe_layers": [*range(arch.num_layers)],
        "no_rope_layers": [*map(int, local.with_positions)],
        "layer_types": _layer_types(local),
        "attention_chunk_size": local.chunk,
        "use_qk_norm": local.normalized,
        "attn_temperature_tuning": local.scale > 0,
        "attn_scale": local.scale,
        "floor_scale": local.floor_positions,
        "pad_token_id": None,  # absent, transformers takes its own
    }


def check_experts(
    stored: Mapping[str, Any], expected: Mapping[str, Any], count: int
) -> None:
    """Refuse experts that are kept in another layout, or of another number.

    `stored` are the tensors of a checkpoint by name, `expected` is by the names that
    the family has.
    """
    of_one = re.compile(r"\.experts\.(\d+)\.")
    apart = any(of_one.search(name) for name in expected)
    for name, tensor in stored.items():
        number = of_one.search(name)
        if ".experts." in name and apart != bool(number):
            layouts = ("in one tensor per layer", "in a tensor each")
            raise ValueError(
                f"{tensor.file} keeps its experts {layouts[bool(number)]} "
                f"({tensor.name}); this family has them {layouts[apart]}: save it "
                f"again with save_pretrained of transformers"
            )
        if number and int(number[1]) >= count:
            raise ValueError(
                f"{tensor.file} holds tensor {tensor.name}, of an expert that "
                f"config.json does not count: it says {count} experts"
            )
