"""Reading and writing of a decoder's config.json, as Hugging Face defines it.

A field that the forward pass does not support is refused by its name and value; no
field is ignored silently.  `families` has the tables.
"""

import dataclasses
from pathlib import Path
from typing import Any, get_args

from scalerl_jax.formats.model_files import local_path
from scalerl_jax.formats.reading import Fields, read_json
from scalerl_jax.model.architecture import Architecture, FamilyName
from scalerl_jax.model.families import (
    CAPS,
    FEATURES,
    ONLY_VALUES,
    SIZES,
    Family,
    find_family,
    known_fields,
)
from scalerl_jax.model.layer_files import (
    read_ropes,
    read_windows,
    rope_values,
    window_values,
)
from scalerl_jax.model.mixture_files import (
    check_unquantized,
    read_rotated,
    text_fields,
)

CONFIG_FILE = "config.json"
# Suffixes of the names of tensors that hold no parameter.
IGNORED = ("rotary_emb.inv_freq",)
# Prefixes of the names of tensors in a checkpoint that also reads images: of the
# decoder's tensors, and of those that the decoder does not use.
TEXT = "language_model."
IMAGES = ("vision_model.", "vision_tower.", "multi_modal_projector.")
# model_type of a checkpoint that also reads images -> model_type of its decoder.
_WITH_IMAGES = {"llama4": "llama4_text", "gemma3": "gemma3_text"}
# Those that transformers opens as a whole, also as a model of text alone.
_OPENED_WHOLE = ("gemma3",)
_MOST_LAYERS = 2**14  # a file with more is broken


def read_architecture(checkpoint: str | Path) -> Architecture:
    """Return the architecture of a Hugging Face directory, hub id or GGUF file.

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
    sizes = _read_sizes(fields, family)
    num_layers = sizes["num_layers"]
    features: dict[str, Any] = dict(family.features)
    if family.read is not None:
        features |= family.read(fields, num_layers)
    if "local" not in features:
        features["windows"] = read_windows(fields, family, num_layers)
    if family.some_rotated:
        rotated = read_rotated(fields, num_layers)
        features["rotated"] = () if all(rotated) else rotated
    if family.scale_field:
        scalar = _whole(fields, family.scale_field)
        if scalar != sizes["head_dim"]:
            features["attention_scale"] = scalar**-0.5
    for field, names in family.biases.items():
        fields.only(field, (True, False))
        features |= dict.fromkeys(names, bool(fields.values.get(field)))
    for field, cap in CAPS.items() if family.caps else ():
        given = fields.values.get(field) is not None
        features[cap] = fields.number(field) if given else 0.0
    rope, near = read_ropes(fields, family)
    if features.get("windows") and near != rope:
        features["window_rope"] = near
    return Architecture(
        family=name,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rms_eps=fields.number("rms_norm_eps"),
        tied_embeddings=bool(fields.values.get("tie_word_embeddings", False)),
        **sizes,
        **features,
    )


def _read_sizes(fields: Fields, family: Family) -> dict[str, int]:
    """Return the sizes, checked against each other."""
    num_heads = fields.integer("num_attention_heads")
    defaults = {"num_kv_heads": num_heads}
    if not family.own_head_dim:
        defaults["head_dim"] = fields.integer("hidden_size") // num_heads
    fields.integer("num_hidden_layers", most=_MOST_LAYERS)
    sizes = {
        size: fields.integer(theirs, defaults.get(size))
        for size, theirs in {**SIZES, **family.sizes}.items()
    }
    if num_heads % sizes["num_kv_heads"]:
        raise fields.refuse(
            "num_key_value_heads", f"it must divide num_attention_heads = {num_heads}"
        )
    if sizes["head_dim"] % 2:
        raise fields.refuse(
            "head_dim", f"rotary positions need an even one: {sizes['head_dim']}"
        )
    return sizes


def _whole(fields: Fields, name: str) -> float:
    found = fields.number(name)
    if found != round(found):
        raise fields.refuse(name, "a whole number")
    return found


def is_below_language_model(checkpoint: str | Path) -> bool:
    """Return whether transformers has the decoder's modules in `language_model`.

    It opens some checkpoints that also read images as a whole, also for text alone.
    """
    kind = read_json(local_path(checkpoint) / CONFIG_FILE).get("model_type")
    return kind in _OPENED_WHOLE


def _decoder_fields(file: Any) -> Fields:
    """Return a decoder's fields with its defaults; refuse unknown fields and models."""
    fields = Fields(file, read_json(file))
    if "config" in fields.values and "model_type" not in fields.values:
        raise ValueError(
            f"{file} is that of a run; name a directory of its policy, which scalerl "
            f"export --checkpoint=RUN --out=DIRECTORY makes"
        )
    kind: Any = fields.values.get("model_type")
    if isinstance(kind, str) and kind in _WITH_IMAGES:
        fields = text_fields(fields, _WITH_IMAGES[kind])
    name: Any = fields.values.get("model_type")
    if name not in (names := sorted(get_args(FamilyName))):
        raise fields.refuse("model_type", f"choose from {names}")
    family = find_family(name)
    defaults = dict(family.defaults)
    if "rope_scaling" in fields.values:  # the older name of rope_parameters
        defaults.pop("rope_parameters", None)
    fields = fields.with_defaults(defaults)
    fixed = {field: (value,) for field, value in family.fixed.items()}
    for field, allowed in (ONLY_VALUES | fixed).items():
        if field not in family.idle and field not in family.biases:
            fields.only(field, allowed)
    if "quantization_config" not in family.known:
        check_unquantized(fields)
    known = known_fields(family)
    for field in fields.values:
        if field not in known:
            raise fields.refuse(
                field[:100], f"no {name} model is known to have it; remove it if not"
            )
    return fields


def config_values(
    arch: Architecture, *, dtype: str, eos_token_id: int | list[int] | None
) -> dict[str, Any]:
    """Return fields that `read_architecture` and transformers 4 and 5 can read."""
    family = find_family(arch.family)
    chosen = {name for names in family.biases.values() for name in names}
    for field in dataclasses.fields(Architecture):
        if field.name in FEATURES - chosen:
            wanted = family.features.get(field.name, field.default)
            assert getattr(arch, field.name) == wanted, f"{field.name} of its family"
    values: dict[str, Any] = {
        "architectures": [family.loader],
        "model_type": arch.family,
        **{
            theirs: getattr(arch, name)
            for name, theirs in {**SIZES, **family.sizes}.items()
        },
        "hidden_act": "silu",
        "rms_norm_eps": arch.rms_eps,
        **rope_values(arch, family),
        "tie_word_embeddings": arch.tied_embeddings,
        "torch_dtype": dtype,
        # Written even if null: if absent, transformers uses the family's own ids.
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": eos_token_id,
        **family.fixed,
        **window_values(arch, family),
    }
    if arch.activation != "silu":
        del values["hidden_act"]
    if family.some_rotated:
        rotated = arch.rotated or (True,) * arch.num_layers
        values["no_rope_layers"] = [*map(int, rotated)]
    for field, names in family.biases.items():
        values[field] = getattr(arch, names[0])
        assert all(getattr(arch, name) == values[field] for name in names), field
    if family.caps:
        values |= {field: getattr(arch, name) or None for field, name in CAPS.items()}
    if family.scale_field:
        scale = arch.attention_scale or arch.head_dim**-0.5
        values[family.scale_field] = round(scale**-2)
    return values | (family.write(arch) if family.write else {})
