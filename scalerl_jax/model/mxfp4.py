"""Experts' matrices of 4-bit numbers with shared scales, as in published gpt-oss.

A block of 32 numbers along an output's inputs is 16 bytes, the earlier number in the
lower half of each, and one more byte for a power of two:

    number = E2M1[4 bits] * 2 ^ (scale - 127)

OCP Microscaling Formats, version 1.0, section 5.4.  bfloat16 represents them exactly.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_BLOCKS, _SCALES = "_blocks", "_scales"  # suffixes of the names of the two parts
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = np.array([*_POSITIVE, *(-each for each in _POSITIVE)], np.float32)
_BLOCK = 32  # numbers


@dataclasses.dataclass(frozen=True)
class PackedTensor:
    """A tensor [experts, inputs, outputs] stored in two, read like a `SafeTensor`."""

    blocks: Any  # `model.weights.SafeTensor` [experts, outputs, inputs / 32, 16]
    scales: Any  # `SafeTensor` [experts, outputs, inputs / 32]
    name: str

    @property
    def file(self) -> Path:
        """File of the blocks."""
        return self.blocks.file

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        experts, outputs, blocks, _ = self.blocks.shape
        return experts, blocks * _BLOCK, outputs

    def read(self, region: tuple[tuple[int, int], ...]) -> np.ndarray:
        """Return a part (from, to per dimension) in float32; whole blocks are read."""
        experts, (first, end), outputs = region
        start, stop = first // _BLOCK, -(-end // _BLOCK)
        place = (experts, outputs, (start, stop))
        packed = self.blocks.read((*place, (0, _BLOCK // 2)))
        numbers = _E2M1[np.stack([packed & 15, packed >> 4], axis=-1)]
        powers = self.scales.read(place).astype(np.int32) - 127
        numbers = np.ldexp(numbers, powers[..., None, None])
        numbers = numbers.reshape(*numbers.shape[:2], -1).swapaxes(1, 2)
        return numbers[:, first - start * _BLOCK : end - start * _BLOCK]


def join_packed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors by name, with each pair of blocks and scales as one tensor.

    Raises:
        ValueError: names a tensor of bytes that is not in a pair.
    """
    joined = {}
    for name, tensor in stored.items():
        if tensor.dtype != np.uint8:
            joined[name] = tensor
            continue
        whole = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        blocks, scales = (stored.get(f"{whole}{end}") for end in (_BLOCKS, _SCALES))
        held, scaled = (each and each.shape for each in (blocks, scales))
        if whole == name or not scaled or held != (*scaled, _BLOCK // 2):
            raise ValueError(
                f"{tensor.file}: tensor {name} has dtype U8 and shape {tensor.shape}, "
                f"and is no part of a tensor in blocks of {_BLOCK} 4-bit numbers"
            )
        joined[whole] = PackedTensor(blocks, scales, whole)
    return joined
