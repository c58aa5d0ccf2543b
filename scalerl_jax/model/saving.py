"""Writing of parameters to safetensors files that transformers loads.

An export is complete or does not exist; one tensor and one file are written at a time.
"""

import contextlib
import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.numpy import save_file

from scalerl_jax.formats.reading import require_local
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.hugging_face import CONFIG_FILE, config_values
from scalerl_jax.model.weights import DTYPES, INDEX, SINGLE, StoredParameter, parameters
from scalerl_jax.process.full_disk import why_full
from scalerl_jax.types import PyTree
from scalerl_jax.weights.shards import named_leaves

# Files of the tokenizer, its templates and its EOS tokens.
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
# Files beside the weights; the last records how a base checkpoint was made.
COMPANIONS = (*TOKENIZER_FILES, "warmstart.json")
# Files of an export of low-rank factors.
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"


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

    It is written under another name and renamed when complete.  An earlier export at
    `directory` is replaced; a directory with other files is refused.

    Args:
        directory: made with its parents.
        params: on any devices; they stay there.
        arch: the architecture, for config.json.
        dtype: dtype of the files.
        max_shard_bytes: size limit of a file, unless one tensor is larger.
        companions: names in `COMPANIONS` and the contents of these files.
        eos_token_id: the EOS ids, for config.json.

    Raises:
        ValueError: `params` do not fit `arch`, or `directory` holds other files or is
            in a bucket.
        RuntimeError: it cannot be written; its earlier content is unchanged.
    """
    require_local(directory)
    directory, dtype = Path(directory).absolute(), np.dtype(dtype)
    companions = companions or {}
    assert companions.keys() <= set(COMPANIONS), sorted(companions)
    if dtype not in DTYPES.values():
        choices = sorted(known.name for known in DTYPES.values())
        raise ValueError(f"dtype = {dtype.name}; choose from {choices}")
    found = parameters(arch)
    leaves = _check_params(params, found)
    with whole_directory(directory) as partial:
        _write_tensors(partial, leaves, found, dtype, max_shard_bytes)
        for name, content in companions.items():
            (partial / name).write_bytes(content)
        config = config_values(arch, dtype=dtype.name, eos_token_id=eos_token_id)
        _write_json(partial / CONFIG_FILE, config)


def check_place(directory: str | Path, *, num_bytes: int = 0) -> None:
    """Refuse, before expensive work, a directory that cannot be written.

    `num_bytes` is its future size, beside an earlier export until that is replaced.  No
    file is left behind.

    Raises:
        ValueError: it holds other files, or is in a bucket.
        RuntimeError: it cannot be written, or there is too little space.
    """
    require_local(directory)
    directory = Path(directory).absolute()
    _check_replaceable(directory)
    there = next(parent for parent in directory.parents if parent.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        raise RuntimeError(
            f"cannot write {directory} ({error.strerror} in {there}); free space or "
            f"rights there, or name another directory"
        ) from error
    if num_bytes > free:
        raise RuntimeError(
            f"cannot write {directory} (it needs {num_bytes:,} bytes, and {free:,} are "
            f"free in {there}); free space there, or name another directory"
        )


@contextlib.contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty directory to write into, which then replaces `directory`."""
    partial = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.replaced")
    try:
        if replaced.exists() and not directory.exists():  # killed between the renames
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
            f"cannot write {directory} ({why_full(error) or error}); free space or "
            f"rights there, or name another directory"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


def _check_replaceable(directory: Path) -> None:
    known = (CONFIG_FILE, INDEX, *COMPANIONS, ADAPTER_CONFIG, ADAPTER_TENSORS)
    if directory.is_symlink():
        raise ValueError(
            f"{directory} is a link, which would be replaced; name a directory"
        )
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; name a directory")
    for file in directory.iterdir() if directory.exists() else ():
        if file.name not in known and not file.match("model*.safetensors"):
            raise ValueError(
                f"{directory} holds {file.name}, which no export writes, and would be "
                f"replaced as a whole; name a new directory"
            )


def _check_params(params: PyTree, found: list[StoredParameter]) -> list[jax.Array]:
    """Return the leaves of `params`, in the order of `found`, or refuse them."""
    leaves = named_leaves(params)
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
    found: list[StoredParameter],
    dtype: np.dtype,
    max_shard_bytes: int,
) -> None:
    """Write one file, or several and the index of their tensors."""
    sizes = {
        name: math.prod(shape) * dtype.itemsize
        for parameter in found
        for name, shape in parameter.tensors.items()
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
        (directory / file).chmod(0o644)  # safetensors makes it private
    if count > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        _write_json(directory / INDEX, index)


def _tensors(
    leaves: list[jax.Array], found: list[StoredParameter], dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor by name, in Hugging Face's layout."""
    for leaf, parameter in zip(leaves, found, strict=True):
        for name, parts in itertools.groupby(parameter.parts, lambda part: part.tensor):
            tensor = np.empty(parameter.tensors[name], dtype)
            for part in parts:
                index = (slice(None) if at is None else at for at in part.place)
                matrix = np.asarray(leaf[tuple(index)])
                matrix = matrix.T if part.transposed else matrix
                last = part.column + part.step * (matrix.shape[-1] - 1)
                columns = slice(part.column, last + 1, part.step)
                tensor[(*part.before, ..., columns)] = matrix
            yield name, tensor


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
