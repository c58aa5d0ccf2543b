"""The fields of config.json about single layers: windows, rotary positions."""

import dataclasses
from collections.abc import Callable
from typing import Any

from scalerl_jax.formats.reading import Fields
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.families import Family
from scalerl_jax.model.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
)

_Read = Callable[[Fields, str], Any]
_FULL, _NEAR = "full_attention", "sliding_attention"


def _number(rope: Fields, name: str) -> float:
    return rope.number(name)


def _integer(rope: Fields, name: str) -> int:
    return rope.integer(name)


def _flag(rope: Fields, name: str) -> bool:
    rope.only(name, (True, False))
    return bool(rope.values[name])


# rope_type -> (class, {its field: (name in config.json, function that reads it)}).
_ORIGINAL = ("original_max_position_embeddings", _integer)
SCALINGS: dict[str, tuple[type, dict[str, tuple[str, _Read]]]] = {
    "linear": (LinearScaling, {"factor": ("factor", _number)}),
    "dynamic": (DynamicScaling, {"factor": ("factor", _number)}),
    "llama3": (
        Llama3Scaling,
        {
            "factor": ("factor", _number),
            "low_freq_factor": ("low_freq_factor", _number),
            "high_freq_factor": ("high_freq_factor", _number),
            "original_max_positions": _ORIGINAL,
        },
    ),
    "yarn": (
        YarnScaling,
        {
            "factor": ("factor", _number),
            "original_max_positions": _ORIGINAL,
            "beta_fast": ("beta_fast", _number),
            "beta_slow": ("beta_slow", _number),
            "truncate": ("truncate", _flag),
            "attention_factor": ("attention_factor", _number),
        },
    ),
}


def read_ropes(fields: Fields, family: Family) -> tuple[Rope, Rope]:
    """Return the rotary positions of layers that see all tokens, and of windowed ones.

    transformers 5 writes rope_parameters with theta and scaling, for each kind of
    layers if they differ.  Older versions and most published checkpoints have theta and
    scaling as separate fields, some with "type" for "rope_type".
    """
    near_theta = family.window_theta or "rope_theta"
    both = fields.values.get("rope_parameters")
    if family.windows and isinstance(both, dict) and _FULL in both:
        parts = Fields(fields.file, both, "rope_parameters.")
        parts.known((_FULL, _NEAR), what="kind of layers")
        whole = fields.values.get("rope_scaling") or {}
        full = _rope_section(parts, _FULL, whole)
        near = _rope_section(parts, _NEAR, {})
        return _read_rope(full, fields), _read_rope(near, fields, near_theta)
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    rope = _read_rope(_rope_section(fields, name, {}), fields)
    if not family.window_theta:
        return rope, rope
    return rope, Rope(fields.number(near_theta))


def _rope_section(fields: Fields, name: str, more: dict[str, Any]) -> Fields:
    given = fields.values.get(name) or {}
    if not isinstance(given, dict) or not isinstance(more, dict):
        raise fields.refuse(name, "it must be an object")
    return Fields(fields.file, given | more, prefix=f"{fields.prefix}{name}.")


def _read_rope(rope: Fields, fields: Fields, theta_field: str = "rope_theta") -> Rope:
    rope.only("partial_rotary_factor", (1.0,))
    if "rope_theta" in rope.values:
        theta = rope.number("rope_theta")
    else:
        theta = fields.number(theta_field)
    kind_field = "rope_type" if "rope_type" in rope.values else "type"
    kind = rope.values.get(kind_field, "default")
    scaling, known = None, {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if kind != "default":
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise rope.refuse(kind_field, f"choose from {['default', *SCALINGS]}")
        made, parts = SCALINGS[kind]
        optional = {
            each.name
            for each in dataclasses.fields(made)
            if each.default is not dataclasses.MISSING
        }
        scaling = made(
            **{
                name: read(rope, theirs)
                for name, (theirs, read) in parts.items()
                if name not in optional or rope.values.get(theirs) is not None
            }
        )
        if isinstance(scaling, Llama3Scaling):
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            if high < low:  # Llama 4 Scout has 1 for both
                raise rope.refuse(
                    "high_freq_factor", f"low_freq_factor = {low}, or more"
                )
        known |= {theirs for theirs, _ in parts.values()}
    for name, value in rope.values.items():
        if name not in known and value is not None:
            raise rope.refuse(name, f"a rope of type {kind!r} has {sorted(known)}")
    return Rope(theta, scaling)


def rope_values(arch: Architecture, family: Family) -> dict[str, Any]:
    """Return the fields of config.json that `read_ropes` reads."""

    def of(rope: Rope) -> dict[str, Any] | None:
        for kind, (made, parts) in SCALINGS.items():
            if type(rope.scaling) is made:
                values = {
                    theirs: getattr(rope.scaling, name)
                    for name, (theirs, _) in parts.items()
                }
                given = {
                    name: each for name, each in values.items() if each is not None
                }
                return {"rope_type": kind} | given
        return None

    scaling = of(arch.rope)
    if scaling is None and "rope_parameters" in family.defaults:
        scaling = {"rope_type": "default"}  # transformers takes null for its default
    values: dict[str, Any] = {"rope_theta": arch.rope_theta, "rope_scaling": scaling}
    if family.window_theta:
        near = arch.window_rope or arch.rope
        parts = {_FULL: arch.rope, _NEAR: near}
        values |= {family.window_theta: near.theta} | values
        values["rope_parameters"] = {
            name: (of(rope) or {"rope_type": "default"}) | {"rope_theta": rope.theta}
            for name, rope in parts.items()
        }
    return values


def read_windows(fields: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    """Return the window of each layer in tokens, 0: all; () if all layers see all."""
    given = fields.values.get("layer_types")
    if family.windows is None:
        if given and (not isinstance(given, list) or set(map(str, given)) - {_FULL}):
            raise fields.refuse("layer_types", f"only {_FULL!r} in every layer is")
        return ()
    if family.windows == "all":
        if fields.values.get("sliding_window") is None:
            return ()
        return (fields.integer("sliding_window"),) * num_layers
    assert isinstance(family.windows, int)
    if given is None:
        # Of two names transformers reads this one, and writes the other.
        every = fields.integer("sliding_window_pattern", family.windows)
        given = [_NEAR if each % every else _FULL for each in range(1, num_layers + 1)]
    if (
        not isinstance(given, list)
        or len(given) != num_layers
        or set(map(str, given)) - {_FULL, _NEAR}
    ):
        raise fields.refuse(
            "layer_types", f"it must be {_FULL!r} or {_NEAR!r} for each layer"
        )
    if _NEAR not in given:
        return ()
    window = fields.integer("sliding_window")
    return tuple(window if each == _NEAR else 0 for each in given)


def window_values(arch: Architecture, family: Family) -> dict[str, Any]:
    """Return the fields of config.json that `read_windows` reads."""
    if family.windows is None:
        return {}
    window = max(arch.windows, default=None)
    if family.windows == "all":
        return {"sliding_window": window}
    windows = arch.windows or (0,) * arch.num_layers
    kinds = [_NEAR if each else _FULL for each in windows]
    # A number even if no layer has a window: transformers makes a mask from it.
    return {"sliding_window": window or arch.max_positions, "layer_types": kinds}
