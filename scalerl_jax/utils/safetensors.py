"""The tensors of a Hugging Face directory: of one safetensors file, or of many."""

import dataclasses
import math
from pathlib import Path

import ml_dtypes
import numpy as np

from scalerl_jax.utils.reading import parse_json, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHERS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")  # of weights
# safetensors' names of number formats.
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class SafeTensor:
    """Place of a tensor's bytes."""

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file

    def read(self, region: tuple[tuple[int, int], ...]) -> np.ndarray:
        """A view of a part (from, to per dimension), read when it is used."""
        tensor = np.memmap(
            self.file, self.dtype, mode="r", offset=self.start, shape=self.shape
        )
        return tensor[tuple(slice(*bounds) for bounds in region)]


def read_tensors(directory: Path) -> dict[str, SafeTensor]:
    """Every tensor of the directory, from the headers of its files.

    Raises:
        ValueError: names the file that is missing, cut short or broken, and the
            tensor of another dtype.
    """
    if (directory / SINGLE).is_file():
        return _read_header(directory / SINGLE)
    if not (directory / INDEX).is_file():
        others = sorted(
            path.name for path in directory.glob("*") if path.suffix in _OTHERS
        )
        raise ValueError(
            f"{directory} holds neither {SINGLE} nor {INDEX}, but {others}; other "
            f"weight formats must be converted to safetensors first, with "
            f"save_pretrained of transformers, say; a .gguf file is named itself"
        )
    weight_map = read_json(directory / INDEX).get("weight_map") or {}
    stored: dict[str, SafeTensor] = {}
    for file in sorted(set(weight_map.values())):
        if not (directory / file).is_file():
            example = min(name for name in weight_map if weight_map[name] == file)
            raise ValueError(
                f"{directory / file} does not exist; {INDEX} says it holds {example}"
            )
        stored |= _read_header(directory / file)
    for name, file in weight_map.items():
        if name not in stored or stored[name].file.name != file:
            raise ValueError(
                f"{directory / file} lacks tensor {name}, which {INDEX} puts there"
            )
    return stored


def _read_header(path: Path) -> dict[str, SafeTensor]:
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
            header = parse_json(file.read(data_start - 8))
            tensors = {
                name: (each["dtype"], tuple(each["shape"]), begin, end)
                for name, each in header.items()
                if name != "__metadata__"
                for begin, end in [each["data_offsets"]]
            }
        except (ValueError, KeyError, TypeError, AttributeError) as failure:
            raise ValueError(f"{path} has a corrupt header: {failure}") from failure
    stored = {}
    for name, (dtype, shape, begin, end) in tensors.items():
        if data_start + end > size:
            raise ValueError(
                f"{path} is cut short: tensor {name} ends at byte {data_start + end}, "
                f"the file at {size}; copy it again"
            )
        if dtype not in DTYPES:
            raise ValueError(
                f"{path}: tensor {name} has dtype {dtype}; choose from {sorted(DTYPES)}"
            )
        if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(
                f"{path} has a corrupt header: tensor {name} of shape {shape} and "
                f"dtype {dtype} has {end - begin} bytes"
            )
        stored[name] = SafeTensor(path, name, DTYPES[dtype], shape, data_start + begin)
    return stored
