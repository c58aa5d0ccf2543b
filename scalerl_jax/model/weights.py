"""Hugging Face checkpoint directories <-> the parameter tree.

Safetensors files of the Llama 3, Qwen2.5 and Qwen3 families, read and written one
parameter at a time; `hf_config` has their config.json.  Hugging Face keeps a matrix
per layer as [out, in]; here they are [in, out] and stacked over layers.
"""

import dataclasses
import itertools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from scalerl_jax.model.architecture import (
    Architecture,
    ParamSpec,
    parameter_table,
)
from scalerl_jax.model.hf_config import (
    CONFIG_FILE,
    config_values,
    read_architecture,
    read_json,
)
from scalerl_jax.parallel.multihost import put_global
from scalerl_jax.types import PyTree

__all__ = ["load_params", "read_architecture", "save_params"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZER = "tokenizer.json"

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}

_TOP_TENSORS = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_LAYER_TENSORS = {
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
}


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """A leaf of the parameter tree and the tensors that hold it, layer by layer."""

    name: str
    spec: ParamSpec
    tensors: tuple[str, ...]
    stacked: bool

    @property
    def transposed(self) -> bool:
        return self.stacked and len(self.spec.shape) == 3

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        shape = self.spec.shape[1:] if self.stacked else self.spec.shape
        return shape[::-1] if self.transposed else shape


def _parameters(arch: Architecture) -> list[_Parameter]:
    """In the order of `jax.tree.leaves(parameter_table(arch))`."""
    specs, _ = jax.tree_util.tree_flatten_with_path(
        parameter_table(arch), is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )
    parameters = []
    for path, spec in specs:
        *parents, last = (key.key for key in path)
        tensors = (
            tuple(
                f"model.layers.{layer}.{_LAYER_TENSORS[last]}"
                for layer in range(arch.num_layers)
            )
            if parents
            else (_TOP_TENSORS[last],)
        )
        name = "/".join((*parents, last))
        parameters.append(_Parameter(name, spec, tensors, stacked=bool(parents)))
    return parameters


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Where a tensor's bytes lie."""

    file: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file

    def read(self) -> np.ndarray:
        dtype = _DTYPES[self.dtype]
        return np.memmap(
            self.file, dtype, mode="r", offset=self.start, shape=self.shape
        )


def load_params(
    directory: str | Path,
    arch: Architecture,
    *,
    dtype: DTypeLike,
    shardings: PyTree | None = None,
) -> PyTree:
    """The parameters in `directory`, cast to `dtype` and placed as `shardings` says.

    The host holds one whole parameter (all layers of one matrix) at a time.

    Raises:
        ValueError: names the tensor and file that is missing, unexpected, of another
            shape or dtype, or cut short.
    """
    parameters = _parameters(arch)
    placements = jax.tree.leaves(shardings) or [None] * len(parameters)
    stored = _stored_tensors(Path(directory))
    _check_tensors(Path(directory), stored, parameters, arch)
    leaves = []
    for parameter, placement in zip(parameters, placements, strict=True):
        host = np.empty(parameter.spec.shape, dtype)
        for layer, name in enumerate(parameter.tensors):
            tensor = stored[name].read()
            tensor = tensor.T if parameter.transposed else tensor
            host[layer if parameter.stacked else ...] = tensor
        # Waiting frees `host` before the next one is made: transfers are asynchronous.
        leaves.append(jax.block_until_ready(put_global(host, placement)))
    treedef = jax.tree.structure(
        parameter_table(arch), is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )
    return jax.tree.unflatten(treedef, leaves)


def _stored_tensors(directory: Path) -> dict[str, _Stored]:
    """Every tensor of the directory, from the headers of its files."""
    if (directory / _SINGLE).is_file():
        return _read_header(directory / _SINGLE)
    if not (directory / _INDEX).is_file():
        raise ValueError(
            f"{directory} holds neither {_SINGLE} nor {_INDEX}; "
            f"other weight formats must be converted to safetensors first"
        )
    weight_map = read_json(directory / _INDEX).get("weight_map") or {}
    stored: dict[str, _Stored] = {}
    for file in sorted(set(weight_map.values())):
        if not (directory / file).is_file():
            example = min(name for name in weight_map if weight_map[name] == file)
            raise ValueError(
                f"{directory / file} does not exist; {_INDEX} says it holds {example}"
            )
        stored |= _read_header(directory / file)
    for name, file in weight_map.items():
        if name not in stored or stored[name].file.name != file:
            raise ValueError(
                f"{directory / file} lacks tensor {name}, which {_INDEX} puts there"
            )
    return stored


def _read_header(path: Path) -> dict[str, _Stored]:
    """Tensors of one safetensors file: 8 bytes of length, JSON, then the data.

    Parsed here because safetensors' own reader does not say which tensor of a file
    was cut short.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        data_start = 8 + int.from_bytes(file.read(8), "little")
        if size < 8 or data_start > size:
            raise ValueError(f"{path} is cut short within its header ({size} bytes)")
        try:
            header = json.loads(file.read(data_start - 8))
            header.pop("__metadata__", None)
            tensors = []
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                tensors.append(
                    (name, entry["dtype"], tuple(entry["shape"]), begin, end)
                )
        except (ValueError, KeyError, TypeError, AttributeError) as failure:
            raise ValueError(f"{path} has a corrupt header: {failure}") from failure
    stored = {}
    for name, dtype, shape, begin, end in tensors:
        if data_start + end > size:
            raise ValueError(
                f"{path} is cut short: tensor {name} ends at byte {data_start + end}, "
                f"the file at {size}; copy it again"
            )
        if (
            dtype in _DTYPES
            and end - begin != math.prod(shape) * _DTYPES[dtype].itemsize
        ):
            raise ValueError(
                f"{path} has a corrupt header: tensor {name} of shape {shape} and "
                f"dtype {dtype} has {end - begin} bytes"
            )
        stored[name] = _Stored(path, dtype, shape, data_start + begin)
    return stored


def _check_tensors(
    directory: Path,
    stored: dict[str, _Stored],
    parameters: list[_Parameter],
    arch: Architecture,
) -> None:
    """Refuse what does not fit `arch`, before anything is read."""
    expected = {name: param for param in parameters for name in param.tensors}
    missing = [name for name in expected if name not in stored]
    if missing:
        raise ValueError(
            f"{directory} lacks {len(missing)} of the {len(expected)} tensors of this "
            f"{arch.family} model, first {missing[0]}; found in "
            f"{sorted({tensor.file.name for tensor in stored.values()})}"
        )
    for name, tensor in stored.items():
        if name not in expected:
            tied_head = arch.tied_embeddings and name == _TOP_TENSORS["head"]
            if tied_head or name.endswith("rotary_emb.inv_freq"):
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
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{tensor.file}: tensor {name} has dtype {tensor.dtype}; "
                f"choose from {sorted(_DTYPES)}"
            )


def save_params(
    directory: str | Path,
    params: PyTree,
    arch: Architecture,
    *,
    dtype: DTypeLike,
    max_shard_bytes: int = 5 * 10**9,
    tokenizer_file: str | Path | None = None,
    eos_token_id: int | None = None,
) -> None:
    """Write a directory that transformers' `AutoModelForCausalLM` loads.

    It is written under another name and renamed when whole.  An earlier export at
    `directory` is replaced; a directory with anything else in it is refused.  The
    host holds one whole parameter and one shard at a time.

    Raises:
        ValueError: `params` do not fit `arch`, or `directory` is not ours to replace.
    """
    directory, dtype = Path(directory).absolute(), np.dtype(dtype)
    if dtype not in _DTYPES.values():
        choices = sorted(known.name for known in _DTYPES.values())
        raise ValueError(f"dtype = {dtype.name}; choose from {choices}")
    parameters = _parameters(arch)
    leaves = _check_params(params, parameters)
    partial = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.replaced")
    if replaced.exists() and not directory.exists():  # died between the two renames
        replaced.rename(directory)
    _check_replaceable(directory)
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_tensors(partial, leaves, parameters, dtype, max_shard_bytes)
        if tokenizer_file is not None:
            shutil.copyfile(tokenizer_file, partial / _TOKENIZER)
        config = config_values(arch, dtype=dtype.name, eos_token_id=eos_token_id)
        _write_json(partial / CONFIG_FILE, config)
        if directory.exists():
            directory.rename(replaced)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


def _check_replaceable(directory: Path) -> None:
    known = (CONFIG_FILE, _TOKENIZER, _INDEX)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; name a directory")
    for file in directory.iterdir() if directory.exists() else ():
        if file.name not in known and not file.match("model*.safetensors"):
            raise ValueError(
                f"{directory} holds {file.name}, which no export writes, and would be "
                f"replaced as a whole; name a new directory"
            )


def _check_params(params: PyTree, parameters: list[_Parameter]) -> list[jax.Array]:
    """The leaves of `params`, in the order of `parameters`."""
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    shapes = {parameter.name: parameter.spec.shape for parameter in parameters}
    for name in sorted(leaves.keys() | shapes.keys()):
        found = leaves[name].shape if name in leaves else None
        if found != shapes.get(name):
            raise ValueError(
                f"parameter {name} has shape {found}; the architecture asks for "
                f"{shapes.get(name)} (None: no such parameter)"
            )
    return [leaves[parameter.name] for parameter in parameters]


def _write_tensors(
    directory: Path,
    leaves: list[jax.Array],
    parameters: list[_Parameter],
    dtype: np.dtype,
    max_shard_bytes: int,
) -> None:
    """One file, or as many as needed and the index that says what is where."""
    plan: list[list[str]] = [[]]
    total = room = 0
    for parameter in parameters:
        size = math.prod(parameter.tensor_shape) * dtype.itemsize
        for name in parameter.tensors:
            if plan[-1] and size > room:
                plan.append([])
            room = (room if plan[-1] else max_shard_bytes) - size
            total += size
            plan[-1].append(name)

    files = [
        f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        for number in range(1, len(plan) + 1)
    ]
    files = files if len(plan) > 1 else [_SINGLE]
    tensors = _tensors(leaves, parameters, dtype)
    for file, names in zip(files, plan, strict=True):
        shard = dict(itertools.islice(tensors, len(names)))
        # transformers refuses files that do not name a format.
        save_file(shard, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)  # safetensors makes it the owner's alone
    if len(plan) > 1:
        where = {
            name: file
            for file, names in zip(files, plan, strict=True)
            for name in names
        }
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write_json(directory / _INDEX, index)


def _tensors(
    leaves: list[jax.Array], parameters: list[_Parameter], dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor by name, as Hugging Face lays it out."""
    for leaf, parameter in zip(leaves, parameters, strict=True):
        host = np.asarray(leaf)
        for layer, name in enumerate(parameter.tensors):
            tensor = host[layer] if parameter.stacked else host
            tensor = tensor.T if parameter.transposed else tensor
            yield name, np.ascontiguousarray(tensor, dtype=dtype)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
