"""The description of a decoder, the table of its parameters, and their shardings.

Shapes, logical axes and initialisers come from `parameter_table` alone: weights,
shardings and random starts are all made from it.  No array is computed here.

A mesh has the axes of `parallel.mesh.AXES`; `MESH_AXES` maps each logical axis of a
parameter to the mesh axes that shard it.  Uneven shards are refused here, before
anything is compiled, instead of being padded.  The file is above 400 lines: parameters
are described and sharded in one file.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from scalerl_jax.model.quantized import MATRICES, Quantized
from scalerl_jax.model.rope import Rope, Scaling
from scalerl_jax.parallel.mesh import ROWS, SHARDS, Device, make_mesh
from scalerl_jax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Experts:
    """A feed-forward of several experts; each token is routed to a few of them.

    `gate` names the function from logits to the gates of the chosen experts: "softmax"
    over all experts, "normalized" to a sum of 1 over the chosen, or "sigmoid" of each.
    """

    count: int
    top_k: int  # experts per token
    gate: Literal["softmax", "normalized", "sigmoid"]
    gate_input: bool = False  # the gate scales an expert's input, not its output
    shared: bool = False  # one more expert, for all tokens, without a gate
    bias: bool = False  # each expert has a bias in the choice, not in the gates
    biased: bool = False  # the experts' products and the router's logits have biases
    clamp: float = 0.0  # limit of `layers.clamped_gated`; 0: silu, without a limit

    @property
    def id_dtype(self) -> np.dtype[Any]:
        """Dtype of expert ids in rollouts, whose largest value means no expert."""
        return np.dtype(np.uint8 if self.count <= np.iinfo(np.uint8).max else np.uint16)


@dataclasses.dataclass(frozen=True)
class LocalLayers:
    """Layers with positions that see only a chunk, and others without (Llama 4).

    A layer with positions rotates queries and keys, and a token sees those of its own
    chunk.  In a layer without positions it sees all tokens, and queries are scaled by

        1 + scale * log(1 + floor((position + 1) / floor_positions))
    """

    with_positions: tuple[bool, ...]  # per layer
    chunk: int  # tokens
    normalized: bool  # queries and keys are normalised after the rotation
    scale: float  # 0: queries are not scaled
    floor_positions: int


FamilyName = Literal[
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "llama4_text",
    "mistral",
    "olmo2",
    "olmo3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A decoder of a family whose checkpoints `hugging_face` can read.

    The family determines the names and layout of checkpoints; the other fields alone
    determine the computation.
    """

    family: FamilyName
    vocab_size: int
    hidden_size: int
    ffn_size: int  # of one expert in a mixture
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    tied_embeddings: bool
    max_positions: int
    rope_scaling: Scaling | None = None
    qkv_bias: bool = False  # query, key and value projections have biases (Qwen2)
    output_bias: bool = False  # attention's output projection has a bias (gpt-oss)
    ffn_bias: bool = False  # a dense feed-forward's three projections have biases
    qk_norm: bool = False  # queries and keys have a norm with weights (Qwen3)
    whole_qk_norm: bool = False  # that norm is over all heads together (OLMo 2)
    # Norms: before attention and the feed-forward, after them (their outputs are
    # normalised, and then added to their inputs), or both.
    norms: Literal["before", "after", "both"] = "before"
    norm_offset: float = 0.0  # added to the weights of every norm (Gemma)
    activation: Literal["silu", "gelu_tanh"] = "silu"  # see `layers.ACTIVATIONS`
    scaled_embeddings: bool = False  # scale by the root of hidden_size (Gemma)
    attention_scale: float | None = None  # scale of scores; None: head_dim^-0.5
    # Soft caps of scores and of logits, `attention.capped`; 0: none (Gemma 2).
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    sinks: bool = False  # each head has a score that belongs to no token (gpt-oss)
    # Per layer, the tokens that a token sees, including itself; 0: all; (): all layers
    # see all.
    windows: tuple[int, ...] = ()
    window_rope: Rope | None = None  # rope of layers with a window; None: `rope`
    rotated: tuple[bool, ...] = ()  # which layers have positions; (): all (SmolLM3)
    experts: Experts | None = None
    local: LocalLayers | None = None

    @property
    def rope(self) -> Rope:
        """Rotary positions of the layers that see all tokens."""
        return Rope(self.rope_theta, self.rope_scaling)

    def windows_within(self, tokens: int) -> tuple[int, ...]:
        """Return the windows if one is shorter than sequences of `tokens`; else ()."""
        narrow = any(0 < window < tokens for window in self.windows)
        return self.windows if narrow else ()

    @functools.cached_property
    def num_params(self) -> int:
        """Number of parameters, including embeddings."""
        return sum(spec.size for spec in jax.tree.leaves(parameter_table(self)))

    @functools.cached_property
    def num_active_params(self) -> int:
        """Number of parameters that a token uses: only those of its chosen experts."""
        if self.experts is None:
            return self.num_params
        idle = self.experts.count - self.experts.top_k
        return self.num_params - self.num_expert_params // self.experts.count * idle

    @functools.cached_property
    def num_expert_params(self) -> int:
        """Number of the experts' parameters, without the shared expert's; 0: none."""
        return sum(
            spec.size
            for spec in jax.tree.leaves(parameter_table(self))
            if spec.axes[:2] == ("layers", "experts")
        )

    @functools.cached_property
    def _num_layer_matrix_params(self) -> int:
        """Number of parameters in the layers' matrices that multiply a token."""
        layers = parameter_table(self)["layers"].values()
        matrices = [spec for spec in layers if not spec.is_vector]
        if self.experts is None:
            return sum(spec.size for spec in matrices)
        count, top_k = self.experts.count, self.experts.top_k
        return sum(
            spec.size // count * top_k if "experts" in spec.axes else spec.size
            for spec in matrices
        )

    def flops_per_token(self, context: float, *, head: bool = True) -> float:
        """Return the forward FLOPs of one token that attends to `context` tokens.

        Two per active parameter of each matmul (the embedding lookup, norms and biases
        are no matmuls), and 4 * heads * head_dim per attended token and layer.  In a
        layer that sees chunks a token attends to half a chunk on average, if that is
        less, and in a layer with a window to at most the window.
        """
        matmul_params = self._num_layer_matrix_params
        if head:
            matmul_params += self.vocab_size * self.hidden_size
        attention = 4 * self.num_heads * self.head_dim * self.seen(context)
        return 2.0 * matmul_params + attention

    def seen_in_rows(self, length: float) -> float:
        """Return the tokens attended to, summed over layers and tokens of a whole row.

        Layers that see chunks count as if they saw all.
        """
        seen = 0.0
        for window in self.windows or (0,) * self.num_layers:
            later = max(0.0, length - window) if window else 0.0
            seen += length * (length + 1) / 2 - later * (later + 1) / 2
        return seen

    def seen(self, context: float) -> float:
        """Return the tokens, of `context`, that one attends to, summed over layers."""
        if self.windows:
            return sum(min(context, window or context) for window in self.windows)
        seen = self.num_layers * context
        if self.local is not None:
            near = sum(self.local.with_positions)
            seen -= near * max(0.0, context - self.local.chunk / 2)
        return seen


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter: shape, a logical axis per dimension, and initialiser.

    It is a leaf for `jax.tree`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    dtype: str = ""  # of its own; empty: that of the tree

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_vector(self) -> bool:
        """Return whether the parameter is a vector, or one per layer or expert.

        Norms, biases and sinks are vectors.
        """
        axes = [axis for axis in self.axes if axis not in ("layers", "experts", "pair")]
        return len(axes) == 1


# Parameters of the parts of a layer, with the axis of each dimension.
_NORMS_BEFORE = {"attention_norm": "width", "ffn_norm": "width"}
_NORMS_AFTER = {"attention_out_norm": "width", "ffn_out_norm": "width"}
_ATTENTION = {
    "query": "hidden heads",
    "key": "hidden kv_heads",
    "value": "hidden kv_heads",
    "output": "heads hidden",
}
_QKV_BIAS = {"query_bias": "heads", "key_bias": "kv_heads", "value_bias": "kv_heads"}
_QK_NORM = {"query_norm": "head_dim", "key_norm": "head_dim"}
_WHOLE_QK_NORM = {"query_norm": "heads", "key_norm": "kv_heads"}
_GATED = {
    "gate": "hidden ffn",
    "up": "hidden ffn",
    "down": "ffn hidden",
}
_FFN_BIAS = {"gate_bias": "ffn", "up_bias": "ffn", "down_bias": "width"}
# An expert's gate and up matrices are one array: they are multiplied together.
_EXPERTS = {
    "router": "hidden router",
    "expert_gate_up": "experts hidden pair ffn",
    "expert_down": "experts ffn hidden",
}
_SHARED_EXPERT = {f"shared_{name}": _GATED[name] for name in ("gate", "up", "down")}
_ROUTER_BIAS = {"router_bias": "router"}
_EXPERT_BIASES = {
    "router_logit_bias": "router",
    "expert_gate_up_bias": "experts pair ffn",
    "expert_down_bias": "experts width",
}


def parameter_table(arch: Architecture) -> PyTree:
    """Return a `ParamSpec` per parameter; layers are stacked on a leading axis."""
    extents = {
        "vocab": arch.vocab_size,
        "layers": arch.num_layers,
        "hidden": arch.hidden_size,
        "width": arch.hidden_size,  # of a vector, which is not sharded
        "heads": arch.num_heads * arch.head_dim,
        "kv_heads": arch.num_kv_heads * arch.head_dim,
        "head_dim": arch.head_dim,
        "sinks": arch.num_heads,
        "ffn": arch.ffn_size,
        "pair": 2,
    }
    if arch.experts is not None:
        extents |= {"experts": arch.experts.count, "router": arch.experts.count}

    def spec(name: str, axes: str) -> ParamSpec:
        names = tuple(axes.split())
        norm = "zeros" if arch.norm_offset else "ones"
        starts = {"norm": norm, "bias": "zeros"}
        init: Any = starts.get(name.rpartition("_")[2], "normal")
        return ParamSpec(tuple(extents[axis] for axis in names), names, init)

    table = {
        "embedding": spec("embedding", "vocab hidden"),
        "layers": {
            name: spec(name, f"layers {axes}") for name, axes in _layer(arch).items()
        },
        "final_norm": spec("final_norm", "width"),
    }
    return table if arch.tied_embeddings else table | {"head": table["embedding"]}


def _layer(arch: Architecture) -> dict[str, str]:
    """Return the parameters of a layer, with their axes."""
    layer = _ATTENTION | (_GATED if arch.experts is None else _EXPERTS)
    layer |= _NORMS_BEFORE if arch.norms != "after" else {}
    layer |= _NORMS_AFTER if arch.norms != "before" else {}
    layer |= _QKV_BIAS if arch.qkv_bias else {}
    layer |= {"output_bias": "width"} if arch.output_bias else {}
    layer |= _FFN_BIAS if arch.ffn_bias else {}
    layer |= {"sinks": "sinks"} if arch.sinks else {}
    if arch.qk_norm:
        layer |= _WHOLE_QK_NORM if arch.whole_qk_norm else _QK_NORM
    if arch.experts is not None:
        layer |= _SHARED_EXPERT if arch.experts.shared else {}
        layer |= _ROUTER_BIAS if arch.experts.bias else {}
        layer |= _EXPERT_BIASES if arch.experts.biased else {}
    return layer


def layered_table(arch: Architecture, weights_dtype: str = "model") -> PyTree:
    """Return `parameter_table` with an array per layer: `layers` is a tuple.

    Programs that unroll the layers take this form: slicing a stack would copy the
    weights if the compiler does not fuse the slice.  An expert's gate and up matrices
    are one array ("both"): TPUs would change the layout of a pair in each call.  With
    `weights_dtype` "int8" the matrices of the layers are `Quantized`.

    Raises:
        ValueError: the model is a mixture, and its matrices shall be integers.
    """
    if weights_dtype == "int8" and arch.experts is not None:
        raise ValueError(
            "sampler.weights_dtype = 'int8' is for dense models: the grouped products "
            "of a mixture's experts read no integers; set it to 'model'"
        )

    def of_a_layer(spec: ParamSpec) -> ParamSpec:
        shape, axes = spec.shape[1:], spec.axes[1:]
        if "pair" in axes:
            shape, axes = (*shape[:-2], math.prod(shape[-2:])), (*axes[:-2], "both")
        return ParamSpec(shape, axes, spec.init)

    table = parameter_table(arch)
    layer: PyTree = {name: of_a_layer(spec) for name, spec in table["layers"].items()}
    if weights_dtype == "int8":
        for name in MATRICES:
            shape, axes = layer[name].shape, layer[name].axes
            layer[name] = Quantized(
                values=ParamSpec(shape, axes, dtype="int8"),  # type: ignore
                scale=ParamSpec(shape[1:], axes[1:], "ones"),  # type: ignore
            )
    return table | {"layers": (layer,) * arch.num_layers}


OF_EXPERTS = ("expert", "tensor")  # mesh axes that divide experts in the sampler

# Logical axis of a `ParamSpec` -> mesh axes that shard it.
MESH_AXES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "hidden": SHARDS,
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "sinks": ("tensor",),
    "ffn": ("tensor",),
    "experts": ("expert",),
    "router": (),
    "pair": (),
    "both": ("tensor",),
    "layers": (),
    "width": (),
    "head_dim": (),
    "rank": (),
}


def learner_sharding(spec: ParamSpec, mesh: Mesh) -> NamedSharding:
    """Return the sharding of one parameter on the learner's mesh."""
    return _sharding(spec, mesh, _cut)


def param_shardings(arch: Architecture, mesh: Mesh) -> PyTree:
    """Return a `NamedSharding` per parameter, in the tree of `parameter_table`.

    Raises:
        ValueError: a mesh axis does not divide the axis that it shards.  Heads stay
            whole: halves of a head would be sent between devices in every layer.
    """
    pieces = {"heads": arch.num_heads, "kv_heads": arch.num_kv_heads}

    def shard(path: tuple, spec: ParamSpec) -> NamedSharding:
        for dimension, (axis, extent) in enumerate(
            zip(spec.axes, spec.shape, strict=True)
        ):
            cut, count = _cut(spec, axis), pieces.get(axis, extent)
            shards = math.prod(mesh.shape[name] for name in cut)
            if count % shards:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"mesh.{cut[0]} = {shards} does not divide dimension "
                    f"{dimension} of parameter {name}: {axis} = {count}; "
                    f"set mesh.{cut[0]} to a divisor of {count}"
                )
        return _sharding(spec, mesh, _cut)

    return jax.tree_util.tree_map_with_path(shard, parameter_table(arch))


def _cut(spec: ParamSpec, axis: str) -> tuple[str, ...]:
    """Return the mesh axes that shard an axis of a parameter, each used only once."""
    cut = MESH_AXES[axis]
    if axis != "experts" and "experts" in spec.axes:
        return tuple(name for name in cut if name not in MESH_AXES["experts"])
    return cut


def _sharding(
    spec: ParamSpec, mesh: Mesh, cut: Callable[[ParamSpec, str], tuple[str, ...]]
) -> NamedSharding:
    """Return a parameter's sharding; `cut` maps its axes to the mesh axes."""
    cuts = (cut(spec, axis) for axis in spec.axes)
    axes = (each[0] if len(each) == 1 else each or None for each in cuts)
    return NamedSharding(mesh, PartitionSpec(*axes))


def layered_shardings(
    arch: Architecture, mesh: Mesh, weights_dtype: str = "model"
) -> PyTree:
    """Return `param_shardings` for the tree of `layered_table`."""
    param_shardings(arch, mesh)  # refuses uneven shards
    table = layered_table(arch, weights_dtype)
    return jax.tree.map(lambda spec: _sharding(spec, mesh, _cut), table)


def sampler_copies(arch: Architecture, devices: int) -> int:
    """Return the number of copies of a replica's non-expert weights.

    It is 1, except that a mixture may have more devices than kv heads, since each
    device has other experts.
    """
    return devices // math.gcd(arch.num_kv_heads, devices) if arch.experts else 1


def check_replica(arch: Architecture, devices: int) -> None:
    """Refuse a number of devices that does not divide the kv heads, or the experts."""
    if not is_divisible(arch, devices):
        count, what = _divided(arch)
        raise ValueError(
            f"generators.devices = {devices} does not divide the {count} {what} of the "
            f"model; use a divisor"
        )


def is_divisible(arch: Architecture, devices: int) -> bool:
    """Return whether experts or kv heads divide evenly over `devices`."""
    return _divided(arch)[0] % devices == 0


def _divided(arch: Architecture) -> tuple[int, str]:
    experts = arch.experts
    return (experts.count, "experts") if experts else (arch.num_kv_heads, "kv heads")


def sampler_mesh(arch: Architecture, devices: Sequence[Device]) -> Mesh:
    """Return the mesh of a replica, after `check_replica`."""
    check_replica(arch, len(devices))
    copies = sampler_copies(arch, len(devices))
    tensor = len(devices) // copies
    return make_mesh(devices, fsdp=copies, expert=copies, tensor=tensor)


def sampler_shardings(
    arch: Architecture, mesh: Mesh, weights_dtype: str = "model"
) -> PyTree:
    """Return a `NamedSharding` per parameter of `layered_table`, on a `sampler_mesh`.

    Whole experts are divided among all devices; the rest is sharded over "tensor".
    """

    def cut(spec: ParamSpec, axis: str) -> tuple[str, ...]:
        if "experts" in spec.axes:
            return OF_EXPERTS if axis == "experts" else ()
        return tuple(name for name in MESH_AXES[axis] if name == "tensor")

    table = layered_table(arch, weights_dtype)
    return jax.tree.map(lambda spec: _sharding(spec, mesh, cut), table)


def sampler_layout(
    arch: Architecture, *, dtype: DTypeLike, mesh: Mesh, weights_dtype: str = "model"
) -> PyTree:
    """Return shapes, dtypes and shardings of the sampler's params."""
    return jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(
            spec.shape, spec.dtype or dtype, sharding=sharding
        ),
        layered_table(arch, weights_dtype),
        sampler_shardings(arch, mesh, weights_dtype),
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a microbatch [R, S]: R over data, fsdp; S over context."""
    return NamedSharding(mesh, PartitionSpec(ROWS, "context"))
