"""Bytes on the fullest device: what lives there, part by part, and what programs add.

Parts are computed from shapes and shardings; a program's peak is the compiler's own.
"""

import dataclasses
import math
from typing import Any

import jax

from scalerl_jax.config import Config
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.parallel.mesh import largest_divisor
from scalerl_jax.types import PyTree


def device_bytes(tree: PyTree) -> int:
    """Of one device, for arrays or shapes that have shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """What the compiler says of one program, in bytes of a device."""

    arguments: int
    outputs: int
    aliased: int  # outputs that take an argument's place
    temporaries: int  # at the peak
    code: int

    @property
    def peak(self) -> int:
        """While it runs, with everything it was given."""
        return (
            self.arguments + self.outputs - self.aliased + self.temporaries + self.code
        )


def program_memory(compiled: Any) -> ProgramMemory:
    """Of a compiled program.

    The total of all temporaries that the compiler reports counts arrays that a loop
    updates in place twice, and is above what it allocates; its peak is not.
    """
    stats = compiled.memory_analysis()
    kept = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
    )
    peak = getattr(stats, "peak_memory_in_bytes", 0)
    temporaries = max(0, peak - kept) if peak else stats.temp_size_in_bytes
    return ProgramMemory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=temporaries,
        code=stats.generated_code_size_in_bytes,
    )


def saved_activations(config: Config, arch: Architecture) -> int:
    """Bytes of a device that a microbatch's forward pass keeps for the backward one.

    Per token and layer, in the compute dtype, by `model.remat`: the layer's input;
    with "attention" what attention found and its float32 normalisers; with "dots"
    the results of all matmuls too; with "none" also what lies between them.
    """
    heads = arch.num_heads // config.mesh.tensor
    queries = heads * arch.head_dim
    keys = arch.num_kv_heads // config.mesh.tensor * arch.head_dim
    ffn = arch.ffn_size // config.mesh.tensor
    itemsize = 2 if config.model.compute_dtype == "bfloat16" else 4
    matmuls = queries + 2 * keys + 2 * arch.hidden_size + 2 * ffn
    values = {
        "full": 0,
        "attention": queries,
        "dots": queries + matmuls,
        "none": queries + matmuls + queries + keys + 2 * arch.hidden_size + ffn,
    }[config.model.remat]
    normalisers = 0 if config.model.remat == "full" else 4 * heads
    per_token = (arch.hidden_size + values) * itemsize + normalisers
    return arch.num_layers * device_tokens(config) * per_token


def device_tokens(config: Config) -> int:
    """Tokens of a microbatch on one device."""
    mesh, batch = config.mesh, config.batch
    rows = batch.rows_per_microbatch // (mesh.data * mesh.fsdp)
    return rows * batch.row_tokens // mesh.context


def logits_tile(config: Config, arch: Architecture) -> dict[str, int]:
    """Bytes of the head's tile of logits, and of the slab that is gathered for it."""
    vocabulary = arch.vocab_size // config.mesh.tensor
    slab = largest_divisor(vocabulary, config.model.head_chunk_vocab)
    chunk = largest_divisor(device_tokens(config), config.model.head_chunk_tokens)
    itemsize = 4 if config.model.float32_head else 2
    return {
        "logits tile": chunk * slab * 4,
        "slab of the head": slab * arch.hidden_size * itemsize,
    }


def learner_parts(
    config: Config, arch: Architecture, state: PyTree, temporaries: int
) -> dict[str, int]:
    """Bytes of a device while a microbatch is computed."""
    params = device_bytes(state.params)
    gradients = device_bytes(
        jax.tree.map(lambda leaf: leaf.update(dtype=jax.numpy.float32), state.params)
    )
    parts = {
        "params": params,
        "optimizer": device_bytes(state) - params,
        "gradients so far": gradients,
        "gradients of the microbatch": gradients,
        "saved activations": saved_activations(config, arch),
    } | logits_tile(config, arch)
    known = sum(list(parts.values())[3:])
    return parts | {"other temporaries": max(0, temporaries - known)}
