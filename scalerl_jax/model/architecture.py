"""What a decoder looks like, and the one table that describes its parameters.

Shapes, logical axes and initialisers come from `parameter_table` alone: weights,
shardings and random starts are all made from it.  No array is computed here.
"""

import dataclasses
from collections.abc import Callable
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
    """A dense decoder of the Llama 3, Qwen2.5 or Qwen3 family."""

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
        """Whether the query, key and value projections add a bias (Qwen2)."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head (Qwen3)."""
        return self.family == "qwen3"

    @property
    def num_params(self) -> int:
        """Number of parameters, embeddings included."""
        specs = jax.tree.leaves(parameter_table(self), is_leaf=_is_spec)
        return sum(spec.size for spec in specs)

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
    """One parameter: shape, a logical axis per dimension, and how it starts."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size


def _is_spec(value: object) -> bool:
    return isinstance(value, ParamSpec)


def map_specs(function: Callable[..., Any], table: PyTree, *rest: PyTree) -> PyTree:
    """`jax.tree.map` with a `ParamSpec` as the leaf."""
    return jax.tree.map(function, table, *rest, is_leaf=_is_spec)


def parameter_table(arch: Architecture) -> PyTree:
    """Every parameter of the decoder; layers are stacked on a leading axis."""
    width, layers = arch.hidden_size, arch.num_layers
    queries, keys = (
        arch.num_heads * arch.head_dim,
        arch.num_kv_heads * arch.head_dim,
    )

    def stacked(*dims: tuple[int, str | None], init: str = "normal") -> ParamSpec:
        shape, axes = zip((layers, "layers"), *dims, strict=True)
        return ParamSpec(shape, axes, init)  # type: ignore[arg-type]

    hidden = (width, "hidden")
    layer = {
        "attention_norm": stacked((width, None), init="ones"),
        "query": stacked(hidden, (queries, "heads")),
        "key": stacked(hidden, (keys, "kv_heads")),
        "value": stacked(hidden, (keys, "kv_heads")),
        "output": stacked((queries, "heads"), hidden),
        "ffn_norm": stacked((width, None), init="ones"),
        "gate": stacked(hidden, (arch.ffn_size, "ffn")),
        "up": stacked(hidden, (arch.ffn_size, "ffn")),
        "down": stacked((arch.ffn_size, "ffn"), hidden),
    }
    if arch.qkv_bias:
        layer |= {
            "query_bias": stacked((queries, "heads"), init="zeros"),
            "key_bias": stacked((keys, "kv_heads"), init="zeros"),
            "value_bias": stacked((keys, "kv_heads"), init="zeros"),
        }
    if arch.qk_norm:
        layer |= {
            "query_norm": stacked((arch.head_dim, None), init="ones"),
            "key_norm": stacked((arch.head_dim, None), init="ones"),
        }
    table = {
        "embedding": ParamSpec((arch.vocab_size, width), ("vocab", "hidden")),
        "layers": layer,
        "final_norm": ParamSpec((width,), (None,), "ones"),
    }
    if not arch.tied_embeddings:
        table["head"] = ParamSpec((arch.vocab_size, width), ("vocab", "hidden"))
    return table


def layered_table(arch: Architecture) -> PyTree:
    """The same parameters with an array per layer: `layers` is a tuple.

    A program that unrolls the layers takes them so; a slice of a stack would be a copy
    of the weights wherever the compiler does not fuse it.
    """
    table = parameter_table(arch)
    layer = map_specs(
        lambda spec: ParamSpec(spec.shape[1:], spec.axes[1:], spec.init),
        table["layers"],
    )
    return table | {"layers": (layer,) * arch.num_layers}


_LLAMA3_1_ROPE = RopeScaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=8192,
)

# Shapes that a config can name; a checkpoint brings its own (`model.weights`).
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
        rope_scaling=_LLAMA3_1_ROPE,
    ),
    # Qwen/Qwen3-8B, config.json
    "qwen3-8b": Architecture(
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
    ),
    # Qwen/Qwen3-32B, config.json
    "qwen3-32b": Architecture(
        family="qwen3",
        vocab_size=151_936,
        hidden_size=5120,
        ffn_size=25_600,
        num_layers=64,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1_000_000.0,
        rms_eps=1e-6,
        tied_embeddings=False,
        max_positions=40_960,
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
