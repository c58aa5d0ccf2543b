"""Loading of parameters from checkpoints directly onto the devices.

A device's shard of a parameter is filled part by part with the regions of the tensors
that it needs: the host holds one shard, and `_CHUNK_BYTES` of the files at a time.  The
file is above 400 lines, since it also parses the headers of safetensors.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from scalerl_jax.formats.bounded import MOST_JSON, open_regular
from scalerl_jax.formats.model_files import local_path
from scalerl_jax.formats.paths import inside
from scalerl_jax.formats.reading import parse_json, read_json
from scalerl_jax.model.architecture import Architecture, ParamSpec, parameter_table
from scalerl_jax.model.families import find_family
from scalerl_jax.model.hugging_face import IGNORED, IMAGES, TEXT
from scalerl_jax.model.mixture_files import check_experts
from scalerl_jax.model.mxfp4 import join_packed
from scalerl_jax.parallel.mesh import Device
from scalerl_jax.types import PyTree
from scalerl_jax.weights.shards import named_leaves

# Bytes (as float32) of a tensor that are read at a time: few enough rows to transpose
# from [out, in] to [in, out] within a processor's cache.
_CHUNK_BYTES = 2**20

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DIMENSIONS, _LONGEST_NAME = 8, 500  # limits of a tensor
_OTHERS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")  # other weight files
# safetensors' names of dtypes.
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# With bytes, which are allowed only in a checkpoint of 4-bit numbers.
_STORED = DTYPES | {"U8": np.dtype(np.uint8)}

Region = tuple[tuple[int, int], ...]  # (from, to) per dimension
Stored = Any  # `SafeTensor`, `mxfp4.PackedTensor` or `formats.gguf.GGUFTensor`


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """A vector or matrix of a parameter, and its location in a checkpoint.

    Most checkpoints have matrices as [out, in]; parameters are [in, out].
    """

    tensor: str  # its name
    shape: tuple[int, ...]  # of the whole tensor
    place: tuple[int | None, ...]  # index in the parameter; None: a matrix dimension
    before: tuple[int, ...] = ()  # indices in the tensor before the matrix
    column: int = 0  # the matrix's first column in the tensor
    step: int = 1  # from one of its columns to the next
    transposed: bool = False  # the tensor's matrix is [out, in]


@dataclasses.dataclass(frozen=True)
class StoredParameter:
    """A leaf of the parameter tree, and its parts in checkpoints."""

    name: str  # its path in the tree
    spec: ParamSpec
    parts: tuple[StoredPart, ...]

    @functools.cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that hold it, by name, in order."""
        return {part.tensor: part.shape for part in self.parts}


def parameters(arch: Architecture) -> list[StoredParameter]:
    """Return all parameters, in the order of `parameter_table`'s leaves."""
    found, family = [], find_family(arch.family)
    for name, spec in named_leaves(parameter_table(arch)).items():
        pattern = family.tensors[name]
        if spec.axes[0] != "layers":
            whole = (None,) * len(spec.shape)
            parts = [StoredPart(pattern, spec.shape, whole)]
        else:
            parts = [
                part
                for layer in range(arch.num_layers)
                for part in _layer_parts(pattern, layer, spec, family.interleaved)
            ]
        found.append(StoredParameter(name, spec, tuple(parts)))
    return found


def _layer_parts(
    pattern: str, layer: int, spec: ParamSpec, interleaved: bool
) -> list[StoredPart]:
    """Return a layer's parts: a tensor, one per expert, or each expert's in one."""
    shape, name = spec.shape[1:], functools.partial(pattern.format, layer=layer)
    if spec.axes[1] != "experts":
        place = (layer, *(None,) * len(shape))
        transposed = len(shape) == 2
        held = shape[::-1] if transposed else shape
        return [StoredPart(name(), held, place, transposed=transposed)]
    count, columns = shape[0], shape[-1]
    rows = () if spec.is_vector else shape[1:2]
    sides = ("gate", "up") if "pair" in spec.axes else ("",)
    parts = []
    for expert in range(count):
        for index, side in enumerate(sides):
            pair = (index,) if side else ()
            place = (layer, expert, *(None for _ in rows), *pair, None)
            if "{expert}" in pattern:
                tensor = name(expert=expert, side=side)
                parts.append(
                    StoredPart(tensor, (columns, *rows), place, transposed=True)
                )
                continue
            held = (count, *rows, len(sides) * columns)
            column, step = (index, len(sides)) if interleaved else (index * columns, 1)
            parts.append(StoredPart(name(), held, place, (expert,), column, step))
    return parts


def load_params(
    checkpoint: str | Path,
    arch: Architecture,
    *,
    dtype: DTypeLike,
    shardings: PyTree | None = None,
    require_finite: bool = True,
) -> PyTree:
    """Load the parameters of `checkpoint`, cast to `dtype` and placed by `shardings`.

    Each process reads only the shards of its own devices.  Without shardings all
    parameters go to the first device.

    Args:
        checkpoint: a Hugging Face directory or hub id, or a GGUF file.
        arch: the decoder, from `hugging_face.read_architecture`.
        dtype: dtype of the parameters.
        shardings: in the tree of `architecture.parameter_table`.
        require_finite: whether to refuse numbers that are NaN or infinite.

    Raises:
        ValueError: names the tensor and file that is missing, unexpected, of another
            shape or dtype, or cut short.
    """
    path = local_path(checkpoint, weights=True)
    if isinstance(path, Path):
        stored = join_packed(read_tensors(path))
    else:
        stored = path.tensors()
    stored = {
        name.removeprefix(TEXT): tensor
        for name, tensor in stored.items()
        if not name.startswith(IMAGES)
    }
    found = parameters(arch)
    _check_tensors(path, stored, found, arch)
    placements = jax.tree.leaves(shardings) or [None] * len(found)
    leaves = [
        _load(parameter, stored, np.dtype(dtype), placement, require_finite)
        for parameter, placement in zip(found, placements, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(parameter_table(arch)), leaves)


def _load(
    parameter: StoredParameter,
    stored: Mapping[str, Stored],
    dtype: np.dtype,
    placement: Sharding | None,
    require_finite: bool,
) -> jax.Array:
    """Return one parameter, loaded shard by shard."""
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
        # Transfers are asynchronous: waiting frees `host` before the next one is made.
        shards += [
            jax.block_until_ready(jax.device_put(host, device)) for device in devices
        ]
    return jax.make_array_from_single_device_arrays(shape, placement, shards)


def _read(
    parameter: StoredParameter,
    stored: Mapping[str, Stored],
    region: Region,
    dtype: np.dtype,
    require_finite: bool,
) -> np.ndarray:
    """Return a region of a parameter, read part by part and chunk by chunk."""
    host = np.empty([stop - start for start, stop in region], dtype)
    for part in parameter.parts:
        index: list[int | slice] = []
        bounds = []
        for place, (start, stop) in zip(part.place, region, strict=True):
            if place is None:
                index.append(slice(None))
                bounds.append((start, stop))
            elif start <= place < stop:
                index.append(place - start)
        if len(index) < len(region):
            continue  # the part is in another shard
        into = host[tuple(index)]
        if part.transposed:
            into, bounds = into.T, bounds[::-1]
        _fill(into, bounds, part, stored[part.tensor], require_finite)
    return host


def _fill(
    into: np.ndarray,
    bounds: list[tuple[int, int]],
    part: StoredPart,
    tensor: Stored,
    require_finite: bool,
) -> None:
    """Read a region (from, to per dimension) of a part of a tensor into an array."""
    *outer, (start, stop) = bounds
    last = part.column + part.step * (stop - 1)
    columns = (part.column + part.step * start, last + 1)
    before = [(place, place + 1) for place in part.before]
    first, end = outer[0] if outer else (0, 1)  # a vector is read at once
    rows = max(1, _CHUNK_BYTES // (4 * (columns[1] - columns[0])))
    for row in range(first, end, rows):
        until = min(row + rows, end)
        some = [(row, until)] if outer else []
        chunk = tensor.read((*before, *some, columns))[..., :: part.step]
        if require_finite and not _all_finite(chunk):
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name} holds numbers that are NaN "
                f"or infinite; take another checkpoint"
            )
        chunk = chunk.reshape(chunk.shape[len(before) :])
        if outer:
            into[row - first : until - first] = chunk
        else:
            into[:] = chunk


def _all_finite(numbers: np.ndarray) -> bool:
    """Return whether all numbers are finite: each exponent has a bit that is 0."""
    if numbers.dtype.itemsize == 2:  # NumPy's isfinite is ten times slower for these
        exponent = np.uint16(0x7C00 if numbers.dtype == np.float16 else 0x7F80)
        return not ((numbers.view(np.uint16) & exponent) == exponent).any()
    return bool(np.isfinite(numbers).all())


def _check_tensors(
    checkpoint: object,
    stored: Mapping[str, Stored],
    found: list[StoredParameter],
    arch: Architecture,
) -> None:
    """Refuse tensors that do not fit `arch`, before any is read."""
    expected = {name: shape for each in found for name, shape in each.tensors.items()}
    if arch.experts is not None:
        check_experts(stored, expected, arch.experts.count)
    missing = [name for name in expected if name not in stored]
    if missing:
        raise ValueError(
            f"{checkpoint} lacks {len(missing)} of the {len(expected)} tensors of this "
            f"{arch.family} model, first {missing[0]}; found in "
            f"{sorted({tensor.file.name for tensor in stored.values()})}"
        )
    names = find_family(arch.family).tensors
    for name, tensor in stored.items():
        if name not in expected:
            if name.endswith(IGNORED):
                continue
            if arch.tied_embeddings and name == names["head"]:
                _check_tied(tensor, stored[names["embedding"]])
                continue
            raise ValueError(
                f"{tensor.file} holds tensor {tensor.name}, which this {arch.family} "
                f"model does not have (tied_embeddings = {arch.tied_embeddings})"
            )
        if tensor.shape != expected[name]:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name} has shape {tensor.shape}; the "
                f"architecture asks for {expected[name]}"
            )


def _check_tied(head: Stored, embedding: Stored) -> None:
    """Refuse a head that differs from the embedding although the two are tied."""
    rows = max(1, _CHUNK_BYTES // (4 * math.prod(head.shape[1:])))
    regions = [
        (
            (start, min(start + rows, head.shape[0])),
            *((0, end) for end in head.shape[1:]),
        )
        for start in range(0, head.shape[0], rows)
    ]
    if head.shape != embedding.shape or not all(
        np.array_equal(head.read(region), embedding.read(region)) for region in regions
    ):
        raise ValueError(
            f"{head.file}: tensor {head.name} differs from {embedding.name}, and with "
            f"tie_word_embeddings = true in config.json it would not be used; write "
            f"false there to use it (transformers 5 and vLLM do), or remove it from "
            f"the file"
        )


# The tensors of a Hugging Face directory, in one or several safetensors files.


@dataclasses.dataclass(frozen=True)
class SafeTensor:
    """A tensor's location in a file."""

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # offset in the file, bytes

    def read(self, region: tuple[tuple[int, int], ...]) -> np.ndarray:
        """Return a view of a part (from, to per dimension), read when it is used."""
        tensor = np.memmap(
            self.file, self.dtype, mode="r", offset=self.start, shape=self.shape
        )
        return tensor[tuple(slice(*bounds) for bounds in region)]


def read_tensors(directory: Path) -> dict[str, SafeTensor]:
    """Return the directory's tensors by name, from the headers of its files.

    Raises:
        ValueError: names the file that is missing, cut short or broken, or the tensor
            of another dtype.
    """
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)[0]
    if not (directory / INDEX).is_file():
        others = sorted(
            path.name for path in directory.glob("*") if path.suffix in _OTHERS
        )
        raise ValueError(
            f"{directory} holds neither {SINGLE} nor {INDEX}, but {others}; other "
            f"weight formats must be converted to safetensors first, such as with "
            f"save_pretrained of transformers; for GGUF give the .gguf file itself"
        )
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and len(file) + len(name) <= _LONGEST_NAME
        for name, file in weight_map.items()
    ):
        raise ValueError(
            f"{directory / INDEX}: weight_map must name a file for each tensor; copy "
            f"it again"
        )
    stored: dict[str, SafeTensor] = {}
    for file in sorted(set(weight_map.values())):
        # The files in the hub's cache are links to its blobs.
        path = inside(directory, file, follow_links=True)
        if not path.is_file():
            example = min(name for name in weight_map if weight_map[name] == file)
            raise ValueError(f"{path} does not exist; by {INDEX} it holds {example}")
        stored |= read_header(path)[0]
    for name, file in weight_map.items():
        if name not in stored or stored[name].file.name != file:
            raise ValueError(
                f"{directory / file} lacks tensor {name}, which by {INDEX} it holds"
            )
    return stored


def read_header(path: Path) -> tuple[dict[str, SafeTensor], dict[str, Any]]:
    """Return tensors and metadata of a safetensors file: a length, JSON, then data.

    It is parsed here because safetensors' own reader does not report which tensor of a
    file was cut short.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data_start = 8 + int.from_bytes(file.read(8) or b"", "little")
        if size < 8 or data_start > size:
            raise ValueError(f"{path} is cut short within its header ({size} bytes)")
        if data_start > MOST_JSON:
            raise ValueError(
                f"{path} has a header of {data_start - 8:,} bytes; {MOST_JSON:,} at "
                f"most; copy it again"
            )
        try:
            header = parse_json(file.read(data_start - 8))
            if not isinstance(header, dict):
                raise TypeError("it is no JSON object")
            metadata = header.pop("__metadata__", {})
            tensors = {name: _entry(name, each) for name, each in header.items()}
        except (ValueError, KeyError, TypeError) as failure:
            raise ValueError(f"{path} has a corrupt header: {failure}") from failure
    stored = {}
    for name, (dtype, shape, begin, end) in tensors.items():
        if data_start + end > size:
            raise ValueError(
                f"{path} is cut short: tensor {name} ends at byte {data_start + end}, "
                f"the file at {size}; copy it again"
            )
        if dtype not in _STORED:
            raise ValueError(
                f"{path}: tensor {name} has dtype {dtype}; choose from {sorted(DTYPES)}"
            )
        if end - begin != math.prod(shape) * _STORED[dtype].itemsize:
            raise ValueError(
                f"{path} has a corrupt header: tensor {name} of shape {shape} and "
                f"dtype {dtype} has {end - begin} bytes"
            )
        stored[name] = SafeTensor(path, name, _STORED[dtype], shape, data_start + begin)
    return stored, metadata if isinstance(metadata, dict) else {}


def _entry(name: str, each: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape, begin and end of a tensor from its entry in a header."""
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"a tensor's name has {len(name)} letters")
    if not isinstance(each, dict):
        raise TypeError(f"{str(each)[:50]!r} is no entry of a tensor")
    dtype, shape, place = each["dtype"], each["shape"], each["data_offsets"]
    for numbers in (shape, place):
        if not isinstance(numbers, list) or not all(
            type(number) is int and number >= 0 for number in numbers
        ):
            raise TypeError(f"{str(numbers)[:50]!r} must be a list of counts")
    if not isinstance(dtype, str) or len(shape) > _DIMENSIONS or len(place) != 2:
        raise TypeError(f"{str(each)[:90]!r} is no entry of a tensor")
    return dtype, tuple(shape), *place
