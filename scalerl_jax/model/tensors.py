"""Which tensors of a checkpoint hold which parameter, and how they lie there.

Checkpoints keep a matrix per layer as [out, in]; here they are [in, out] and stacked
over layers.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import jax
import numpy as np

from scalerl_jax.model.architecture import Architecture, ParamSpec, parameter_table

# Per dimension of an array, from where to where.
Region = tuple[tuple[int, int], ...]


def all_finite(numbers: np.ndarray) -> bool:
    """Whether none is NaN or infinite: then the exponent has a bit that is 0."""
    if numbers.dtype.itemsize == 2:  # NumPy takes ten times as long for those
        exponent = np.uint16(0x7C00 if numbers.dtype == np.float16 else 0x7F80)
        return not ((numbers.view(np.uint16) & exponent) == exponent).any()
    return bool(np.isfinite(numbers).all())


class Stored(Protocol):
    """A tensor in a file."""

    @property
    def file(self) -> Path:
        """Where it is."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """As it lies there, rows first."""
        ...

    def read(self, region: Region) -> np.ndarray:
        """A part of it; nothing else is read."""
        ...


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """What a format calls the tensors."""

    top: Mapping[str, str]  # parameter -> tensor
    layer: Mapping[str, str]  # parameter of a layer -> tensor, after the prefix
    prefix: str  # of a layer's tensors, with {layer}
    ignored: tuple[str, ...]  # ends of the names of tensors that hold no parameter


HUGGING_FACE = TensorNames(
    top={
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
    },
    layer={
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
    },
    prefix="model.layers.{layer}.",
    ignored=("rotary_emb.inv_freq",),
)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A leaf of the parameter tree and the tensors that hold it, layer by layer."""

    name: str
    spec: ParamSpec
    tensors: tuple[str, ...]
    stacked: bool

    @property
    def transposed(self) -> bool:
        """Whether the tensors are [out, in]."""
        return self.stacked and len(self.spec.shape) == 3

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Of each of the tensors."""
        shape = self.spec.shape[1:] if self.stacked else self.spec.shape
        return shape[::-1] if self.transposed else shape


def parameters(
    arch: Architecture, names: TensorNames = HUGGING_FACE
) -> list[Parameter]:
    """In the order of `jax.tree.leaves(parameter_table(arch))`."""
    specs, _ = jax.tree_util.tree_flatten_with_path(
        parameter_table(arch), is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )
    found = []
    for path, spec in specs:
        *parents, last = (key.key for key in path)
        tensors = (
            tuple(
                names.prefix.format(layer=layer) + names.layer[last]
                for layer in range(arch.num_layers)
            )
            if parents
            else (names.top[last],)
        )
        name = "/".join((*parents, last))
        found.append(Parameter(name, spec, tensors, stacked=bool(parents)))
    return found
