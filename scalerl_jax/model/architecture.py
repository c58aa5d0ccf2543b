"""The description of a decoder, and the one table of its parameters.

Shapes, logical axes and initialisers come from `parameter_table` alone: weights,
shardings and random starts are all made from it.  No array is computed here.
"""

import dataclasses
import math
from typing import Any, Literal

import jax

from scalerl_jax.types import PyTree


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama 3, Qwen2.5 or Qwen3 family."""

    family: Literal["llama", "qwen2", "qwen3"]
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    tied_embeddings: bool
    max_positions: int
    rope_scaling: RopeScaling | None = None

    @property
    def qkv_bias(self) -> bool:
        """Return whether the query, key and value projections add a bias (Qwen2)."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Return whether queries and keys are normalised per head (Qwen3)."""
        return self.family == "qwen3"

    @property
    def feed_forward(self) -> str:
        """The feed-forward of its layers, a name in `transformer.FEED_FORWARDS`."""
        return "gated"

    @property
    def num_params(self) -> int:
        """Number of parameters, embeddings included."""
        return sum(spec.size for spec in jax.tree.leaves(parameter_table(self)))

    def flops_per_token(self, context: float, *, head: bool = True) -> float:
        """Forward FLOPs of one token that attends to `context` tokens.

        Two per parameter of each matmul (the embedding lookup is none), and
        4 * heads * head_dim per attended token and layer.
        """
        embedding = self.vocab_size * self.hidden_size
        matmul_params = self.num_params - (1 if self.tied_embeddings else 2) * embedding
        if head:
            matmul_params += embedding
        attention = 4 * self.num_layers * self.num_heads * self.head_dim * context
        return 2.0 * matmul_params + attention


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter: shape, a logical axis per dimension, and how it starts.

    To `jax.tree` it is a leaf.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


# Parameters of the parts of a layer, with the axis that each dimension lies along.
_ATTENTION = {
    "attention_norm": "width",
    "query": "hidden heads",
    "key": "hidden kv_heads",
    "value": "hidden kv_heads",
    "output": "heads hidden",
}
_QKV_BIAS = {"query_bias": "heads", "key_bias": "kv_heads", "value_bias": "kv_heads"}
_QK_NORM = {"query_norm": "head_dim", "key_norm": "head_dim"}
# By `Architecture.feed_forward`; `transformer.FEED_FORWARDS` computes with them.
_FEED_FORWARDS = {
    "gated": {
        "ffn_norm": "width",
        "gate": "hidden ffn",
        "up": "hidden ffn",
        "down": "ffn hidden",
    }
}


def parameter_table(arch: Architecture) -> PyTree:
    """Every parameter of the decoder; layers are stacked on a leading axis."""
    extents = {
        "vocab": arch.vocab_size,
        "layers": arch.num_layers,
        "hidden": arch.hidden_size,
        "width": arch.hidden_size,  # of a vector, which is cut over no devices
        "heads": arch.num_heads * arch.head_dim,
        "kv_heads": arch.num_kv_heads * arch.head_dim,
        "head_dim": arch.head_dim,
        "ffn": arch.ffn_size,
    }

    def spec(name: str, axes: str) -> ParamSpec:
        names = tuple(axes.split())
        starts = {"norm": "ones", "bias": "zeros"}
        init: Any = starts.get(name.rpartition("_")[2], "normal")
        return ParamSpec(tuple(extents[axis] for axis in names), names, init)

    layer = _ATTENTION | _FEED_FORWARDS[arch.feed_forward]
    layer |= _QKV_BIAS if arch.qkv_bias else {}
    layer |= _QK_NORM if arch.qk_norm else {}
    table = {
        "embedding": spec("embedding", "vocab hidden"),
        "layers": {name: spec(name, f"layers {axes}") for name, axes in layer.items()},
        "final_norm": spec("final_norm", "width"),
    }
    return (
        table
        if arch.tied_embeddings
        else table | {"head": spec("head", "vocab hidden")}
    )


def layered_table(arch: Architecture) -> PyTree:
    """`parameter_table` with an array per layer: `layers` is a tuple.

    A program that unrolls the layers takes them so; a slice of a stack would be a copy
    of the weights wherever the compiler does not fuse it.
    """
    table = parameter_table(arch)
    layer = {
        name: ParamSpec(spec.shape[1:], spec.axes[1:], spec.init)
        for name, spec in table["layers"].items()
    }
    return table | {"layers": (layer,) * arch.num_layers}


_QWEN3_8B = Architecture(
    family="qwen3",
    vocab_size=151_936,
    hidden_size=4096,
    ffn_size=12_288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1_000_000.0,
    rms_eps=1e-6,
    tied_embeddings=False,
    max_positions=40_960,
)

# Shapes that a config can name; a checkpoint brings its own.
ARCHITECTURES: dict[str, Architecture] = {
    # meta-llama/Llama-3.1-8B, config.json
    "llama3.1-8b": Architecture(
        family="llama",
        vocab_size=128_256,
        hidden_size=4096,
        ffn_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500_000.0,
        rms_eps=1e-5,
        tied_embeddings=False,
        max_positions=131_072,
        rope_scaling=RopeScaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=8192,
        ),
    ),
    # Qwen/Qwen3-8B and Qwen/Qwen3-32B, config.json
    "qwen3-8b": _QWEN3_8B,
    "qwen3-32b": dataclasses.replace(
        _QWEN3_8B, hidden_size=5120, ffn_size=25_600, num_layers=64, num_heads=64
    ),
    # The laptop policy: about 0.8 million parameters.
    "tiny": Architecture(
        family="qwen3",
        vocab_size=128,
        hidden_size=128,
        ffn_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=10_000.0,
        rms_eps=1e-6,
        tied_embeddings=True,
        max_positions=512,
    ),
}
