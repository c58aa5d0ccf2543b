"""Checkpoints of others into the parameter tree, straight onto the devices.

Hugging Face directories (`safetensors`, with `hf_config` for their config.json) and
GGUF files (`gguf`) of the Llama 3, Qwen2.5 and Qwen3 families.  A device's shard of a
parameter is filled layer by layer with the parts of the tensors that it needs: the
host holds one shard, and of the files `_CHUNK_BYTES` at a time.
"""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from scalerl_jax.model import gguf, hf_config, safetensors
from scalerl_jax.model.architecture import Architecture, ParamSpec, parameter_table
from scalerl_jax.model.tensors import (
    HUGGING_FACE,
    Parameter,
    Region,
    Stored,
    TensorNames,
    all_finite,
    parameters,
)
from scalerl_jax.parallel.mesh import Device
from scalerl_jax.types import PyTree
from scalerl_jax.utils.gguf import is_gguf
from scalerl_jax.utils.hub import local_path

# Of a tensor, as float32, that is read at one time.  Few rows are also turned from
# [out, in] to [in, out] within a processor's cache.
_CHUNK_BYTES = 2**20


def read_architecture(checkpoint: str | Path) -> Architecture:
    """The architecture of a Hugging Face directory or hub id, or of a GGUF file.

    Raises:
        ValueError: names the field whose value the forward pass does not support.
    """
    checkpoint = local_path(checkpoint)
    if is_gguf(checkpoint):
        return gguf.read_architecture(checkpoint)
    return hf_config.read_architecture(checkpoint)


def load_params(
    checkpoint: str | Path,
    arch: Architecture,
    *,
    dtype: DTypeLike,
    shardings: PyTree | None = None,
    require_finite: bool = True,
) -> PyTree:
    """The parameters in `checkpoint`, cast to `dtype` and placed as `shardings` says.

    Each process reads what its own devices need.  Without shardings everything goes
    to the first device.

    Raises:
        ValueError: names the tensor and file that is missing, unexpected, of another
            shape or dtype, or cut short.
    """
    checkpoint = local_path(checkpoint, weights=True)
    names: TensorNames = HUGGING_FACE
    stored: Mapping[str, Stored]
    if is_gguf(checkpoint):
        names, stored = gguf.NAMES, gguf.stored_tensors(checkpoint, arch)
    else:
        stored = safetensors.stored_tensors(checkpoint)
    found = parameters(arch, names)
    _check_tensors(checkpoint, stored, found, arch, names)
    placements = jax.tree.leaves(shardings) or [None] * len(found)
    leaves = [
        _load(parameter, stored, np.dtype(dtype), placement, require_finite)
        for parameter, placement in zip(found, placements, strict=True)
    ]
    treedef = jax.tree.structure(
        parameter_table(arch), is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )
    return jax.tree.unflatten(treedef, leaves)


def _load(
    parameter: Parameter,
    stored: Mapping[str, Stored],
    dtype: np.dtype,
    placement: Sharding | None,
    require_finite: bool,
) -> jax.Array:
    """One parameter, a shard at a time."""
    shape = parameter.spec.shape
    if placement is None:
        whole = tuple((0, extent) for extent in shape)
        return jax.device_put(_read(parameter, stored, whole, dtype, require_finite))
    holders: dict[Region, list[Device]] = {}
    for device, index in placement.addressable_devices_indices_map(shape).items():
        assert index is not None
        region = tuple(
            part.indices(extent)[:2] for part, extent in zip(index, shape, strict=True)
        )
        holders.setdefault(region, []).append(device)
    shards = []
    for region, devices in holders.items():
        host = _read(parameter, stored, region, dtype, require_finite)
        # Waiting frees `host` before the next one is made: transfers are asynchronous.
        shards += [
            jax.block_until_ready(jax.device_put(host, device)) for device in devices
        ]
    return jax.make_array_from_single_device_arrays(shape, placement, shards)


def _read(
    parameter: Parameter,
    stored: Mapping[str, Stored],
    region: Region,
    dtype: np.dtype,
    require_finite: bool,
) -> np.ndarray:
    """A region of a parameter, read layer by layer and chunk by chunk."""
    host = np.empty([stop - start for start, stop in region], dtype)
    layers, inner = region[:1], region[1:]
    if not parameter.stacked:
        layers, inner = ((0, 1),), region
    if parameter.transposed:
        inner = inner[::-1]
    for place, layer in enumerate(range(*layers[0])):
        part = host[place] if parameter.stacked else host
        part = part.T if parameter.transposed else part
        tensor = stored[parameter.tensors[layer]]
        (first, end), *rest = inner
        row_bytes = 4 * np.prod([stop - start for start, stop in rest], dtype=int)
        rows = max(1, _CHUNK_BYTES // row_bytes)
        for start in range(first, end, rows):
            stop = min(start + rows, end)
            chunk = tensor.read(((start, stop), *rest))
            if require_finite and not all_finite(chunk):
                raise ValueError(
                    f"{tensor.file}: tensor {parameter.tensors[layer]} holds numbers "
                    f"that are NaN or infinite; take another checkpoint"
                )
            part[start - first : stop - first] = chunk
    return host


def _check_tensors(
    checkpoint: Path,
    stored: Mapping[str, Stored],
    found: list[Parameter],
    arch: Architecture,
    names: TensorNames,
) -> None:
    """Refuse what does not fit `arch`, before anything is read."""
    expected = {name: param for param in found for name in param.tensors}
    missing = [name for name in expected if name not in stored]
    if missing:
        raise ValueError(
            f"{checkpoint} lacks {len(missing)} of the {len(expected)} tensors of this "
            f"{arch.family} model, first {missing[0]}; found in "
            f"{sorted({tensor.file.name for tensor in stored.values()})}"
        )
    for name, tensor in stored.items():
        if name not in expected:
            tied_head = arch.tied_embeddings and name == names.top["head"]
            if tied_head or name.endswith(names.ignored):
                continue
            raise ValueError(
                f"{tensor.file} holds tensor {name}, which this {arch.family} model "
                f"does not have (tied_embeddings = {arch.tied_embeddings})"
            )
        if tensor.shape != expected[name].tensor_shape:
            raise ValueError(
                f"{tensor.file}: tensor {name} has shape {tensor.shape}; the "
                f"architecture asks for {expected[name].tensor_shape}"
            )
