"""Parameters out of checkpoints, straight onto the devices, and into safetensors files.

A device's shard of a parameter is filled layer by layer with the parts of the tensors
that it needs: the host holds one shard, and of the files `_CHUNK_BYTES` at a time.  An
export is whole or not there at all; it takes one tensor and one file at a time.
"""

import contextlib
import itertools
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.numpy import save_file

from scalerl_jax.model.architecture import Architecture, parameter_table
from scalerl_jax.model.hugging_face import (
    CONFIG_FILE,
    FAMILIES,
    IGNORED,
    Parameter,
    config_values,
    parameters,
)
from scalerl_jax.parallel.mesh import Device
from scalerl_jax.types import PyTree
from scalerl_jax.utils.hub import local_path
from scalerl_jax.utils.safetensors import DTYPES, INDEX, SINGLE, read_tensors

# What says how texts become tokens and where they end.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
# What may lie beside the weights; the last says how a base checkpoint was made.
COMPANIONS = (*TOKENIZER_FILES, "warmstart.json")
# Of a tensor, as float32, that is read at one time.  Few rows are also turned from
# [out, in] to [in, out] within a processor's cache.
_CHUNK_BYTES = 2**20

Region = tuple[tuple[int, int], ...]  # per dimension, from where to where
Stored = Any  # `utils.safetensors.SafeTensor`, or `utils.gguf.GGUFTensor`, its twin


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

    Args:
        checkpoint: a Hugging Face directory or hub id, or a GGUF file.
        arch: the decoder that `hugging_face.read_architecture` finds there.
        dtype: of the parameters.
        shardings: in the tree of `architecture.parameter_table`.
        require_finite: whether numbers that are NaN or infinite are refused.

    Raises:
        ValueError: names the tensor and file that is missing, unexpected, of another
            shape or dtype, or cut short.
    """
    path = local_path(checkpoint, weights=True)
    stored = read_tensors(path) if isinstance(path, Path) else path.tensors()
    found = parameters(arch)
    _check_tensors(path, stored, found, arch)
    placements = jax.tree.leaves(shardings) or [None] * len(found)
    leaves = [
        _load(parameter, stored, np.dtype(dtype), placement, require_finite)
        for parameter, placement in zip(found, placements, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(parameter_table(arch)), leaves)


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
    layers, inner = (region[0], region[1:]) if parameter.stacked else ((0, 1), region)
    if parameter.transposed:
        inner = inner[::-1]
    for place, layer in enumerate(range(*layers)):
        part = host[place] if parameter.stacked else host
        part = part.T if parameter.transposed else part
        tensor = stored[parameter.tensors[layer]]
        (first, end), *rest = inner
        row_bytes = 4 * math.prod(stop - start for start, stop in rest)
        rows = max(1, _CHUNK_BYTES // row_bytes)
        for start in range(first, end, rows):
            stop = min(start + rows, end)
            chunk = tensor.read(((start, stop), *rest))
            if require_finite and not _all_finite(chunk):
                raise ValueError(
                    f"{tensor.file}: tensor {tensor.name} holds numbers that are NaN "
                    f"or infinite; take another checkpoint"
                )
            part[start - first : stop - first] = chunk
    return host


def _all_finite(numbers: np.ndarray) -> bool:
    """Return whether none is NaN or infinite: then the exponent has a bit that is 0."""
    if numbers.dtype.itemsize == 2:  # NumPy takes ten times as long for those
        exponent = np.uint16(0x7C00 if numbers.dtype == np.float16 else 0x7F80)
        return not ((numbers.view(np.uint16) & exponent) == exponent).any()
    return bool(np.isfinite(numbers).all())


def _check_tensors(
    checkpoint: object,
    stored: Mapping[str, Stored],
    found: list[Parameter],
    arch: Architecture,
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
            tied_head = FAMILIES[arch.family].tensors["head"]
            if name.endswith(IGNORED) or (arch.tied_embeddings and name == tied_head):
                continue
            raise ValueError(
                f"{tensor.file} holds tensor {tensor.name}, which this {arch.family} "
                f"model does not have (tied_embeddings = {arch.tied_embeddings})"
            )
        if tensor.shape != expected[name].tensor_shape:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name} has shape {tensor.shape}; the "
                f"architecture asks for {expected[name].tensor_shape}"
            )


def save_params(
    directory: str | Path,
    params: PyTree,
    arch: Architecture,
    *,
    dtype: DTypeLike,
    max_shard_bytes: int = 5 * 10**9,
    companions: Mapping[str, bytes] | None = None,
    eos_token_id: int | list[int] | None = None,
) -> None:
    """Write a directory that transformers' `AutoModelForCausalLM` loads.

    It is written under another name and renamed when whole.  An earlier export at
    `directory` is replaced; a directory with anything else in it is refused.

    Args:
        directory: made with its parents.
        params: on any devices; they stay there.
        arch: what config.json will say.
        dtype: of the files.
        max_shard_bytes: of a file, unless one tensor is larger.
        companions: names in `COMPANIONS` and the contents of these files.
        eos_token_id: what ends a text, for config.json.

    Raises:
        ValueError: `params` do not fit `arch`, or `directory` is not ours to replace.
        RuntimeError: it cannot be written; what was there before still is.
    """
    directory, dtype = Path(directory).absolute(), np.dtype(dtype)
    companions = companions or {}
    assert companions.keys() <= set(COMPANIONS), sorted(companions)
    if dtype not in DTYPES.values():
        choices = sorted(known.name for known in DTYPES.values())
        raise ValueError(f"dtype = {dtype.name}; choose from {choices}")
    found = parameters(arch)
    leaves = _check_params(params, found)
    with _whole(directory) as partial:
        _write_tensors(partial, leaves, found, dtype, max_shard_bytes)
        for name, content in companions.items():
            (partial / name).write_bytes(content)
        config = config_values(arch, dtype=dtype.name, eos_token_id=eos_token_id)
        _write_json(partial / CONFIG_FILE, config)


@contextlib.contextmanager
def _whole(directory: Path) -> Iterator[Path]:
    """An empty directory to write into, which then takes the place of `directory`."""
    partial = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.replaced")
    try:
        if replaced.exists() and not directory.exists():  # died between two renames
            replaced.rename(directory)
        _check_replaceable(directory)
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if directory.exists():
            directory.rename(replaced)
        partial.rename(directory)
    except (OSError, SafetensorError) as error:
        raise RuntimeError(
            f"cannot write {directory} ({error}); free space or rights there, or name "
            f"another directory"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


def _check_replaceable(directory: Path) -> None:
    known = (CONFIG_FILE, INDEX, *COMPANIONS)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; name a directory")
    for file in directory.iterdir() if directory.exists() else ():
        if file.name not in known and not file.match("model*.safetensors"):
            raise ValueError(
                f"{directory} holds {file.name}, which no export writes, and would be "
                f"replaced as a whole; name a new directory"
            )


def _check_params(params: PyTree, found: list[Parameter]) -> list[jax.Array]:
    """The leaves of `params`, in the order of `found`."""
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    shapes = {parameter.name: parameter.spec.shape for parameter in found}
    for name in sorted(leaves.keys() | shapes.keys()):
        shape = leaves[name].shape if name in leaves else None
        if shape != shapes.get(name):
            raise ValueError(
                f"parameter {name} has shape {shape}; the architecture asks for "
                f"{shapes.get(name)} (None: no such parameter)"
            )
    return [leaves[parameter.name] for parameter in found]


def _write_tensors(
    directory: Path,
    leaves: list[jax.Array],
    found: list[Parameter],
    dtype: np.dtype,
    max_shard_bytes: int,
) -> None:
    """One file, or as many as needed and the index that says what is where."""
    sizes = {
        name: math.prod(parameter.tensor_shape) * dtype.itemsize
        for parameter in found
        for name in parameter.tensors
    }
    plan: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, size in sizes.items():
        if plan[-1] and size > room:
            plan.append([])
            room = max_shard_bytes
        plan[-1].append(name)
        room -= size
    count, where = len(plan), {}
    tensors = _tensors(leaves, found, dtype)
    for number, names in enumerate(plan, 1):
        file = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE
        where |= dict.fromkeys(names, file)
        shard = dict(itertools.islice(tensors, len(names)))
        # transformers refuses files that do not name a format.
        save_file(shard, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)  # safetensors makes it the owner's alone
    if count > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        _write_json(directory / INDEX, index)


def _tensors(
    leaves: list[jax.Array], found: list[Parameter], dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor by name, as Hugging Face lays it out."""
    for leaf, parameter in zip(leaves, found, strict=True):
        for layer, name in enumerate(parameter.tensors):
            tensor = np.asarray(leaf[layer] if parameter.stacked else leaf)
            tensor = tensor.T if parameter.transposed else tensor
            yield name, np.ascontiguousarray(tensor, dtype=dtype)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
