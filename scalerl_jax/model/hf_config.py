"""config.json of a Hugging Face directory <-> `Architecture`.

Whatever the forward pass would not honour (sliding windows, other rotary scalings,
quantised weights) is refused, never dropped.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalerl_jax.model.architecture import Architecture, RopeScaling
from scalerl_jax.utils.reading import read_json

CONFIG_FILE = "config.json"

# model_type in config.json -> the class that transformers loads it into.
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# No field is larger, nor has a model more layers: such a file is broken.
_MOST, _LAYERS = 2**28, 2**14
# Fields whose other values change the forward pass.  Absent and null are fine.
_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "use_sliding_window": (False,),
    "quantization_config": (),
}


@dataclasses.dataclass(frozen=True)
class Fields:
    """Fields of a file; errors name it, the field and the value."""

    path: Path
    values: dict[str, Any]
    prefix: str = ""

    def refuse(self, name: str, supported: str) -> ValueError:
        """The error for a field; `supported` says what would do."""
        value = self.values.get(name)
        shown = "is missing" if value is None else f"= {value!r} is not supported"
        return ValueError(f"{self.path}: {self.prefix}{name} {shown}; {supported}")

    def integer(self, name: str, default: int | None = None) -> int:
        """One from 1 to the largest that a model has."""
        value = self.values.get(name)
        value = default if value is None else value
        most = _LAYERS if name.endswith(("num_hidden_layers", "block_count")) else _MOST
        if type(value) is not int or not 1 <= value <= most:
            raise self.refuse(name, f"it must be an integer from 1 to {most}")
        return value

    def number(self, name: str) -> float:
        """A finite one above 0."""
        value = self.values.get(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < sys.float_info.max
        ):
            raise self.refuse(name, "it must be a number above 0")
        return float(value)

    def only(self, name: str, allowed: Sequence[Any]) -> None:
        """Refuse a value that is there and not allowed."""
        if self.values.get(name) is not None and self.values[name] not in allowed:
            choice = f"only {list(allowed)} is" if allowed else "remove it, no value is"
            raise self.refuse(name, choice)


def read_architecture(directory: str | Path) -> Architecture:
    """The architecture that `directory`/config.json describes.

    Raises:
        ValueError: names the field whose value the forward pass does not support.
    """
    path = Path(directory) / CONFIG_FILE
    if not path.exists():
        raise ValueError(
            f"{path} does not exist; name a Hugging Face directory or a GGUF file"
        )
    values = read_json(path)
    config = Fields(path, values)
    family: Any = values.get("model_type")
    if str(family) not in _CLASSES or family not in _CLASSES:  # it may be a list
        raise config.refuse("model_type", f"choose from {sorted(_CLASSES)}")
    for name, allowed in _ONLY_VALUES.items():
        config.only(name, allowed)
    if family != "qwen2":  # Qwen2 has its biases whatever this field says
        config.only("attention_bias", (False,))
    layer_types = values.get("layer_types") or []
    if not isinstance(layer_types, list) or any(
        each != "full_attention" for each in layer_types
    ):
        raise config.refuse("layer_types", "only 'full_attention' in every layer is")

    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.refuse(
            "num_key_value_heads", f"it must divide num_attention_heads = {num_heads}"
        )
    derived = None if family == "qwen3" else hidden_size // num_heads
    head_dim = config.integer("head_dim", default=derived)
    if head_dim % 2:
        raise config.refuse("head_dim", f"rotary positions need it even: {head_dim}")
    rope_theta, rope_scaling = _read_rope(config)
    return Architecture(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        ffn_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=rope_theta,
        rms_eps=config.number("rms_norm_eps"),
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        max_positions=config.integer("max_position_embeddings"),
        rope_scaling=rope_scaling,
    )


def _read_rope(config: Fields) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from rope_theta and rope_scaling, or from rope_parameters.

    transformers 5 writes rope_parameters, which holds both; older ones and most
    published checkpoints have the two apart, some with "type" for "rope_type".
    """
    section = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    given = config.values.get(section) or {}
    if not isinstance(given, dict):
        raise config.refuse(section, "it must be an object")
    rope = Fields(config.path, given, prefix=f"{section}.")
    rope.only("partial_rotary_factor", (1.0,))
    holder = rope if "rope_theta" in rope.values else config
    theta = holder.number("rope_theta")
    kind_field = "rope_type" if "rope_type" in rope.values else "type"
    kind = rope.values.get(kind_field, "default")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise rope.refuse(kind_field, "choose from ['default', 'llama3']")
    return theta, RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.integer("original_max_position_embeddings"),
    )


def config_values(
    arch: Architecture, *, dtype: str, eos_token_id: int | list[int] | None
) -> dict[str, Any]:
    """What `read_architecture` reads back and transformers 4 and 5 load."""
    rope_scaling = arch.rope_scaling and {
        "rope_type": "llama3",
        "factor": arch.rope_scaling.factor,
        "low_freq_factor": arch.rope_scaling.low_freq_factor,
        "high_freq_factor": arch.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": arch.rope_scaling.original_max_positions,
    }
    values: dict[str, Any] = {
        "architectures": [_CLASSES[arch.family]],
        "model_type": arch.family,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.ffn_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": arch.rms_eps,
        "max_position_embeddings": arch.max_positions,
        "rope_theta": arch.rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": arch.tied_embeddings,
        "torch_dtype": dtype,
        # Written even if null: absent, transformers takes its own ids for Llama.
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
    }
    if arch.family != "qwen2":
        values["attention_bias"] = False
    if arch.family == "llama":
        values["mlp_bias"] = False
    else:
        values["use_sliding_window"] = False
    return values
