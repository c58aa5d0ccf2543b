"""Read the head of a GGUF file: its metadata, and the positions of its tensors.

Every count is compared with the size of the file before memory is allocated for it.
The `gguf` package's own reader trusts counts (a file of 49 bytes that announces 2^62
values fills the memory), and needs 40 us per value: a minute for a tokenizer with a
million.  The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from scalerl_jax.formats.bounded import open_regular

MOST_KEYS = 10_000  # the largest files have about 50
MOST_TENSORS = 200_000
MOST_VALUES = 2**22  # of all lists together; Gemma 3's tokenizer has 1.1 million
MOST_BYTES = 2**28  # of the head
_MOST_NAME = 2**16  # bytes
_MOST_DIMENSIONS = 4
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # of the data, unless the file specifies another
_FLOAT, _BOOLEAN, _STRING, _LIST = 6, 7, 8, 9
_TYPES = dict(enumerate("u1 i1 <u2 <i2 <u4 <i4 <f4 u1".split()))
_TYPES |= dict(enumerate("<u8 <i8 <f8".split(), start=10))


class StoredTensor(NamedTuple):
    """A tensor in the file."""

    name: str
    kind: int  # of `gguf.GGMLQuantizationType`
    shape: tuple[int, ...]  # rows first
    start: int  # bytes from the beginning of the file


class GGUFHead(NamedTuple):
    """Content of a file before its data."""

    metadata: dict[str, Any]  # numbers, booleans, texts, lists of them
    tensors: list[StoredTensor]


def read_head(path: Path) -> GGUFHead:
    """Read the head of a file in little-endian byte order.

    Raises:
        ValueError: the head is malformed, incomplete or not supported; says why.
    """
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        try:
            return _Reader(file, size).read()
        except UnicodeDecodeError as error:
            wrong = f"a text in it is not UTF-8 ({error.reason})"
        except _BadHead as error:
            wrong = str(error)
    raise ValueError(
        f"{path} ({size} bytes) is no GGUF file, or is cut short: {wrong}; copy it "
        f"again"
    )


class _BadHead(Exception):
    """A problem with the head; the message describes it."""


class _Reader:
    """A sequential reader of the head of a file."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._size = file, size
        self._at = self._values = 0

    def read(self) -> GGUFHead:
        if self._take(4) != b"GGUF":
            raise _BadHead("it does not begin with GGUF")
        version = self._number(4)
        if version & 0xFFFF == 0:
            raise _BadHead(
                "it has the byte order of other machines; convert it with "
                "gguf-convert-endian"
            )
        if version not in _VERSIONS:
            raise _BadHead(f"it is of version {version}; only {_VERSIONS} are read")
        num_tensors = self._count("tensors", 24, MOST_TENSORS, later=8)
        metadata: dict[str, Any] = {}
        for _ in range(self._count("keys", 13, MOST_KEYS)):
            name = self._text(_MOST_NAME)
            if name in metadata:
                raise _BadHead(f"it has {name!r} twice")
            metadata[name] = self._value(self._number(4))
        stored = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & alignment - 1:
            raise _BadHead(f"general.alignment = {alignment!r} is no power of two")
        data = -(-self._at // alignment) * alignment
        return GGUFHead(
            metadata, [each._replace(start=data + each.start) for each in stored]
        )

    def _tensor(self) -> StoredTensor:
        name, dimensions = self._text(_MOST_NAME), self._number(4)
        if dimensions > _MOST_DIMENSIONS:
            raise _BadHead(
                f"tensor {name} has {dimensions} dimensions; {_MOST_DIMENSIONS} at most"
            )
        shape = tuple(self._number(8) for _ in range(dimensions))[::-1]
        return StoredTensor(name, self._number(4), shape, self._number(8))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text(MOST_BYTES)
        if kind == _LIST:
            return self._list(self._number(4))
        return self._numbers(kind, 1)[0]

    def _list(self, kind: int) -> list[Any]:
        width = np.dtype(_TYPES.get(kind, "u8")).itemsize  # u8: the length of a text
        count = self._count("values", width, MOST_VALUES - self._values)
        self._values += count
        if kind == _STRING:
            return [self._text(MOST_BYTES) for _ in range(count)]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _TYPES:
            raise _BadHead(f"a value in it is of kind {kind}")
        dtype = np.dtype(_TYPES[kind])
        found = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if kind == _FLOAT:  # by its shortest decimal: 1e-05
            return [float(str(each)) for each in found]
        return (found != 0 if kind == _BOOLEAN else found).tolist()

    def _text(self, most: int) -> str:
        return self._take(self._count("bytes of a text", 1, most)).decode()

    def _count(self, name: str, width: int, most: int, *, later: int = 0) -> int:
        """Read and check the number of following items, each of `width` bytes or more.

        `later` bytes of the file do not belong to these items.
        """
        count, left = self._number(8), self._size - self._at - later
        if count * width > left:
            raise _BadHead(f"it announces {count} {name}, and {left} bytes follow")
        if count > most:
            raise _BadHead(f"it announces {count} {name}; {most} can be read at most")
        return count

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _take(self, count: int) -> bytes:
        self._at += count
        if self._at > MOST_BYTES:
            raise _BadHead(f"its head has more than {MOST_BYTES >> 20} MiB")
        found = self._file.read(count) or b""
        if len(found) < count:
            raise _BadHead(f"it ends within its head, at byte {self._size}")
        return found


def check_extent(path: Path, tensor: StoredTensor, block: tuple[int, int]) -> None:
    """Check that a tensor is completely inside its file.

    Args:
        path: the file.
        tensor: the tensor's entry in the head.
        block: numbers and bytes per block of the tensor's kind.

    Raises:
        ValueError: the tensor is incomplete, or its rows are not whole blocks.
    """
    length, num_bytes = block
    columns = tensor.shape[-1] if tensor.shape else 1
    if columns % length:
        raise ValueError(
            f"{path}: tensor {tensor.name} has rows of {columns} numbers, which are "
            f"not whole blocks of {length}"
        )
    end = tensor.start + math.prod(tensor.shape) // length * num_bytes
    size = path.stat().st_size
    if end > size:
        raise ValueError(
            f"{path} ({size} bytes) is no GGUF file, or is cut short: tensor "
            f"{tensor.name} ends at byte {end}; copy it again"
        )
