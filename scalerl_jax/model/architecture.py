"""The description of a decoder, and the one table of its parameters.

Shapes, logical axes and initialisers come from `parameter_table` alone: weights,
shardings and random starts are all made from it.  No array is computed here.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import numpy as np

from scalerl_jax.types import PyTree


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class Experts:
    """A feed-forward of several experts, of which each token takes a few.

    `gate` makes the gates of the chosen experts from their logits: "softmax" over all
    experts, "normalized" to a sum of 1 among the chosen, or "sigmoid" of each.
    """

    count: int
    top_k: int  # experts of a token
    gate: Literal["softmax", "normalized", "sigmoid"]
    gate_input: bool = False  # what an expert is given is gated, not what it returns
    shared: bool = False  # one more expert, of all tokens and without a gate
    bias: bool = False  # of each expert, in who is chosen and not in the gates

    @property
    def id_dtype(self) -> np.dtype[Any]:
        """Dtype of experts that travel with tokens; its largest value: no expert."""
        return np.dtype(np.uint8 if self.count <= np.iinfo(np.uint8).max else np.uint16)


@dataclasses.dataclass(frozen=True)
class LocalLayers:
    """Layers with positions and near keys among those with neither (Llama 4).

    A layer with positions turns queries and keys, and sees the tokens of its own chunk;
    one without sees all of them, and scales its queries by

        1 + scale * log(1 + floor((position + 1) / floor_positions))
    """

    with_positions: tuple[bool, ...]  # of each layer
    chunk: int  # tokens
    normalized: bool  # queries and keys of layers with positions, after their turn
    scale: float  # 0: queries are not scaled
    floor_positions: int


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A decoder of a family that `hugging_face.FAMILIES` lists."""

    family: Literal["llama", "qwen2", "qwen3", "qwen3_moe", "llama4_text"]
    vocab_size: int
    hidden_size: int
    ffn_size: int  # of one expert, where there are several
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    tied_embeddings: bool
    max_positions: int
    rope_scaling: RopeScaling | None = None
    experts: Experts | None = None
    local: LocalLayers | None = None

    @property
    def qkv_bias(self) -> bool:
        """Return whether the query, key and value projections add a bias (Qwen2)."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Return whether queries and keys have a norm with weights (Qwen3)."""
        return self.family in ("qwen3", "qwen3_moe")

    @property
    def feed_forward(self) -> str:
        """The feed-forward of its layers, a name in `transformer.FEED_FORWARDS`."""
        if self.experts is None:
            return "gated"
        return "shared_experts" if self.experts.shared else "experts"

    @functools.cached_property
    def num_params(self) -> int:
        """Number of parameters, embeddings included."""
        return sum(spec.size for spec in jax.tree.leaves(parameter_table(self)))

    @functools.cached_property
    def num_active_params(self) -> int:
        """Number of parameters that a token meets: of the experts, those it takes."""
        if self.experts is None:
            return self.num_params
        idle = self.experts.count - self.experts.top_k
        return self.num_params - self.num_expert_params // self.experts.count * idle

    @functools.cached_property
    def num_expert_params(self) -> int:
        """Number of parameters of experts, 0 without any; a shared one's are not."""
        return sum(
            spec.size
            for spec in jax.tree.leaves(parameter_table(self))
            if spec.axes[:2] == ("layers", "experts")
        )

    def flops_per_token(self, context: float, *, head: bool = True) -> float:
        """Forward FLOPs of one token that attends to `context` tokens.

        Two per active parameter of each matmul (the embedding lookup is none), and
        4 * heads * head_dim per attended token and layer; a layer that sees chunks
        attends to half of one on average, if that is less.
        """
        embedding = self.vocab_size * self.hidden_size
        outer = (1 if self.tied_embeddings else 2) * embedding
        matmul_params = self.num_active_params - outer
        if head:
            matmul_params += embedding
        attention = 4 * self.num_heads * self.head_dim * self.seen(context)
        return 2.0 * matmul_params + attention

    def seen(self, context: float) -> float:
        """Tokens of `context` that a token attends to, added up over the layers."""
        seen = self.num_layers * context
        if self.local is not None:
            near = sum(self.local.with_positions)
            seen -= near * max(0.0, context - self.local.chunk / 2)
        return seen


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
# An expert's gate and up matrices are one array: they are multiplied together.
_FEED_FORWARDS["experts"] = {
    "ffn_norm": "width",
    "router": "hidden router",
    "expert_gate_up": "experts hidden pair ffn",
    "expert_down": "experts ffn hidden",
}
_FEED_FORWARDS["shared_experts"] = _FEED_FORWARDS["experts"] | {
    f"shared_{name}": _FEED_FORWARDS["gated"][name] for name in ("gate", "up", "down")
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
        "pair": 2,
    }
    if arch.experts is not None:
        extents |= {"experts": arch.experts.count, "router": arch.experts.count}

    def spec(name: str, axes: str) -> ParamSpec:
        names = tuple(axes.split())
        starts = {"norm": "ones", "bias": "zeros"}
        init: Any = starts.get(name.rpartition("_")[2], "normal")
        return ParamSpec(tuple(extents[axis] for axis in names), names, init)

    layer = _ATTENTION | _FEED_FORWARDS[arch.feed_forward]
    if arch.experts is not None and arch.experts.bias:
        layer |= {"router_bias": "router"}
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
    of the weights wherever the compiler does not fuse it.  An expert's gate and up
    matrices lie side by side, "both": as a pair, TPUs lay them out anew in every call.
    """

    def of_a_layer(spec: ParamSpec) -> ParamSpec:
        shape, axes = spec.shape[1:], spec.axes[1:]
        if "pair" in axes:
            shape, axes = (*shape[:-2], math.prod(shape[-2:])), (*axes[:-2], "both")
        return ParamSpec(shape, axes, spec.init)

    table = parameter_table(arch)
    layer = {name: of_a_layer(spec) for name, spec in table["layers"].items()}
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

# Qwen/Qwen3-30B-A3B, config.json.
_QWEN3_30B_A3B = dataclasses.replace(
    _QWEN3_8B,
    family="qwen3_moe",
    hidden_size=2048,
    ffn_size=768,
    num_layers=48,
    num_kv_heads=4,
    experts=Experts(count=128, top_k=8, gate="normalized"),
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
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    # Qwen/Qwen3-235B-A22B, config.json
    "qwen3-235b-a22b": dataclasses.replace(
        _QWEN3_30B_A3B, hidden_size=4096, ffn_size=1536, num_layers=94, num_heads=64
    ),
    # meta-llama/Llama-4-Scout-17B-16E, text_config of config.json
    "scout": Architecture(
        family="llama4_text",
        vocab_size=202_048,
        hidden_size=5120,
        ffn_size=8192,
        num_layers=48,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500_000.0,
        rms_eps=1e-5,
        tied_embeddings=False,
        max_positions=10_485_760,
        rope_scaling=RopeScaling(
            factor=16.0,
            low_freq_factor=1.0,
            high_freq_factor=1.0,
            original_max_positions=8192,
        ),
        experts=Experts(
            count=16, top_k=1, gate="sigmoid", gate_input=True, shared=True
        ),
        local=LocalLayers(
            with_positions=(True, True, True, False) * 12,
            chunk=8192,
            normalized=True,
            scale=0.1,
            floor_positions=8192,
        ),
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
