"""How Hugging Face writes a decoder down: config.json, and the names of its tensors.

`FAMILIES` holds both, for reading and writing alike.  Whatever the forward pass would
not honour (sliding windows, other rotary scalings, quantised weights) is refused, never
dropped.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from scalerl_jax.model.architecture import (
    Architecture,
    ParamSpec,
    RopeScaling,
    parameter_table,
)
from scalerl_jax.utils.hub import local_path
from scalerl_jax.utils.reading import read_json

CONFIG_FILE = "config.json"
# Ends of the names of tensors that hold no parameter.
IGNORED = ("rotary_emb.inv_freq",)
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
}
# Field of an `Architecture`, or of its `RopeScaling` -> field of config.json.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
}
_SCALING = {
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
    fields = _Fields(file, read_json(file))
    family: Any = fields.values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise fields.refuse("model_type", f"choose from {sorted(FAMILIES)}")
    fixed = {name: (value,) for name, value in FAMILIES[family].fixed.items()}
    for name, allowed in (_ONLY_VALUES | fixed).items():
        fields.only(name, allowed)
    layer_types = fields.values.get("layer_types") or []
    if not isinstance(layer_types, list) or set(map(str, layer_types)) - {
        "full_attention"
    }:
        raise fields.refuse("layer_types", "only 'full_attention' in every layer is")

    num_heads = fields.integer("num_attention_heads")
    defaults = {"num_kv_heads": num_heads}
    if family != "qwen3":
        defaults["head_dim"] = fields.integer("hidden_size") // num_heads
    sizes: dict[str, Any] = {
        name: fields.integer(theirs, defaults.get(name))
        for name, theirs in _SIZES.items()
    }
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
        **sizes,
    )


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
        name: rope.number(theirs) for name, theirs in _SCALING.items()
    }
    numbers["original_max_positions"] = rope.integer(_SCALING["original_max_positions"])
    return theta, RopeScaling(**numbers)


def config_values(
    arch: Architecture, *, dtype: str, eos_token_id: int | list[int] | None
) -> dict[str, Any]:
    """Fields that `read_architecture` reads back and transformers 4 and 5 load."""
    scaling, family = arch.rope_scaling, FAMILIES[arch.family]
    return {
        "architectures": [family.loader],
        "model_type": arch.family,
        **{theirs: getattr(arch, name) for name, theirs in _SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": arch.rms_eps,
        "rope_theta": arch.rope_theta,
        "rope_scaling": scaling
        and {"rope_type": "llama3"}
        | {theirs: getattr(scaling, name) for name, theirs in _SCALING.items()},
        "tie_word_embeddings": arch.tied_embeddings,
        "torch_dtype": dtype,
        # Written even if null: absent, transformers takes its own ids for Llama.
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        **family.fixed,
    }


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A leaf of the parameter tree and the tensors that hold it, layer by layer.

    Checkpoints keep a matrix per layer as [out, in]; here they are [in, out] and
    stacked over layers.
    """

    name: str  # its path in the tree
    spec: ParamSpec
    tensors: tuple[str, ...]

    @property
    def stacked(self) -> bool:
        """Return whether the leaf has an axis of layers, each of which is a tensor."""
        return self.spec.axes[0] == "layers"

    @property
    def transposed(self) -> bool:
        """Return whether the tensors are [out, in]."""
        return self.stacked and len(self.spec.shape) == 3

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each of the tensors."""
        shape = self.spec.shape[1:] if self.stacked else self.spec.shape
        return shape[::-1] if self.transposed else shape


def parameters(arch: Architecture) -> list[Parameter]:
    """Every parameter, in the order of `jax.tree.leaves(parameter_table(arch))`."""
    found = []
    for path, spec in jax.tree_util.tree_leaves_with_path(parameter_table(arch)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        pattern = FAMILIES[arch.family].tensors[name]
        layers = range(arch.num_layers if spec.axes[0] == "layers" else 1)
        tensors = tuple(pattern.format(layer=layer) for layer in layers)
        found.append(Parameter(name, spec, tensors))
    return found
