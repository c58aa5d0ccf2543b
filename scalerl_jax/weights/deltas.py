"""Bit-exact differences between two versions of an array of 8- to 64-bit values.

Values are XORed with those of the base and split into planes of bytes: bfloat16 values
that an optimizer step changed by a unit in the last place differ only in their low
byte.  A plane is coded in the shortest of five ways: as unchanged; as all its bytes; or
as the changed bytes, preceded by their positions as a bitmap, or by the gaps between
them in 8 or 16 bits.  Values are treated as bits, also NaN and -0.0.

A delta contains no checksum: the receiver compares the checksum of the result.
"""

import dataclasses
import struct

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_BLOCK = 1 << 20  # values coded at a time, which bounds the memory for positions
_NONE, _ALL, _BITMAP, _GAPS_8, _GAPS_16 = range(5)
_GAPS = {_GAPS_8: np.dtype("<u1"), _GAPS_16: np.dtype("<u2")}
# For each plane of a block: way of coding, number of changed bytes, size of positions.
_HEADER = struct.Struct("<BII")


class DamagedDeltaError(ValueError):
    """A delta does not fit the array to which it is applied; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """The differences between an array and its base."""

    changed: int  # values that differ
    coded: Bytes | None  # None: no shorter than the array itself


def delta(base: NDArray, new: NDArray) -> Delta:
    """Encode the changes from `base` to `new`, arrays of one shape and dtype."""
    assert base.shape == new.shape, f"{base.shape} is not the shape {new.shape}"
    assert base.dtype == new.dtype, f"{base.dtype} is not the dtype {new.dtype}"
    before, after = _bits(base), _bits(new)
    coded, changed = bytearray(), 0
    for start in range(0, after.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        difference = before[block] ^ after[block]
        places = np.flatnonzero(difference != 0)  # twice as fast on booleans
        changed += places.size
        if len(coded) < new.nbytes:  # otherwise changes are only counted
            _code_block(coded, difference, places)
    short = len(coded) < new.nbytes
    return Delta(
        changed=changed, coded=np.frombuffer(coded, np.uint8) if short else None
    )


def apply(base: NDArray, coded: Bytes) -> NDArray:
    """Return the `new` array of a delta; `base` stays unchanged.

    Raises:
        DamagedDeltaError: `coded` is no delta of such an array.  Damaged bytes may
            still form a delta, so compare the checksum of the result.
    """
    result = np.array(base, copy=True, order="C")
    planes = _bits(result).view(np.uint8).reshape(-1, result.itemsize)
    reader = _Reader(np.ascontiguousarray(coded))
    for start in range(0, len(planes), _BLOCK):
        block = planes[start : start + _BLOCK]
        for plane in range(result.itemsize):
            _apply_plane(block[:, plane], reader)
    if reader.left:
        raise DamagedDeltaError(f"{reader.left} bytes follow the last block")
    return result


def _bits(array: NDArray) -> NDArray:
    """Return the array as a flat view of little-endian unsigned integers."""
    bits = np.ascontiguousarray(array).reshape(-1)
    return bits.view(np.dtype(f"<u{array.itemsize}"))


def _code_block(coded: bytearray, difference: NDArray, places: NDArray) -> None:
    """Append all planes of a block; `places` are the positions of changed values."""
    values = difference[places]
    for plane in range(difference.itemsize):
        found = (values >> np.array(8 * plane, values.dtype)).astype(np.uint8)
        present = found != 0
        everything = difference.view(np.uint8)[plane :: difference.itemsize]
        _code_plane(coded, everything, places[present], found[present])


def _code_plane(
    coded: bytearray, everything: Bytes, places: NDArray, found: Bytes
) -> None:
    """Append a plane, coded the shortest way; `found` are its nonzero bytes."""
    size, count = everything.size, places.size
    gaps = np.diff(places, prepend=-1) - 1
    lengths = {
        _ALL: size - count,
        _BITMAP: -(-size // 8),
        **{
            way: width.itemsize * (count + int((gaps // _most(width)).sum()))
            for way, width in _GAPS.items()
        },
    }
    way = min(lengths, key=lengths.__getitem__) if count else _NONE
    if way == _ALL:
        where, found = b"", everything
    elif way == _BITMAP:
        marks = np.zeros(size, bool)
        marks[places] = True
        where = np.packbits(marks).tobytes()
    elif way in _GAPS:
        where = _code_gaps(gaps, _GAPS[way]).tobytes()
    else:
        where = b""
    coded += _HEADER.pack(way, found.size, len(where)) + where + found.tobytes()


def _most(width: np.dtype) -> int:
    """Return the greatest number; it skips that many bytes and marks no change."""
    return int(np.iinfo(width).max)


def _code_gaps(gaps: NDArray, width: np.dtype) -> NDArray:
    """Code the unchanged bytes before each change; a long gap is several numbers."""
    passed, rest = np.divmod(gaps, _most(width))
    ends = np.cumsum(passed + 1)
    numbers = np.full(ends[-1], _most(width), width)
    numbers[ends - 1] = rest
    return numbers


def _read_gaps(numbers: NDArray) -> NDArray:
    most = _most(numbers.dtype)
    is_change = numbers != most
    return (np.cumsum(numbers + is_change.astype(np.int64)) - 1)[is_change]


def _apply_plane(plane: Bytes, reader: "_Reader") -> None:
    """Read the changes of a block's plane, and apply them."""
    way, count, length = _HEADER.unpack(reader.take(_HEADER.size).tobytes())
    where, found = reader.take(length), reader.take(count)
    if way == _NONE and not count and not length:
        return
    if way == _ALL and count == plane.size and not length:
        plane ^= found
        return
    if way == _BITMAP and length == -(-plane.size // 8):
        places = np.flatnonzero(np.unpackbits(where, count=plane.size))
    elif way in _GAPS and length % _GAPS[way].itemsize == 0:
        # Copied, since a view of this width would need an aligned address.
        places = _read_gaps(np.frombuffer(where.tobytes(), _GAPS[way]))
    else:
        raise DamagedDeltaError(
            f"a plane of {plane.size} bytes is coded in way {way} with {count} changes "
            f"and {length} bytes of places"
        )
    if places.size != count or (count and places[-1] >= plane.size):
        raise DamagedDeltaError(
            f"{places.size} places of {count} changes are in {plane.size} bytes"
        )
    plane[places] ^= found


class _Reader:
    """A sequential reader of bytes."""

    def __init__(self, coded: Bytes) -> None:
        self._coded = coded
        self.left = coded.size

    def take(self, size: int) -> Bytes:
        """Return the next bytes.

        Raises:
            DamagedDeltaError: fewer than `size` bytes are left.
        """
        if size > self.left:
            raise DamagedDeltaError(f"it ends {size - self.left} bytes too early")
        start = self._coded.size - self.left
        self.left -= size
        return self._coded[start : start + size]
