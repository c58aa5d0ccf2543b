"""Collectives of compiled programs: bytes that a device sends, by kind and network."""

import dataclasses
import math
import re

import numpy as np

from scalerl_jax.preflight.hlo import Program, shape_bytes

_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # numbers counted along sides, transposed
_ARRAY = re.compile(r"\w+\[[\d,]*\]")
_MEGASCALE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# Kind -> bytes that each of n devices sends to exchange an array of `size` bytes.  The
# array is the whole one: a reduce-scatter's operand, an all-gather's result.
SENT = {
    "all-gather": lambda size, n: size * (n - 1) / n,
    "all-reduce": lambda size, n: 2 * size * (n - 1) / n,
    "reduce-scatter": lambda size, n: size * (n - 1) / n,
    "all-to-all": lambda size, n: size * (n - 1) / n,
    "collective-permute": lambda size, n: size,
}


@dataclasses.dataclass
class Traffic:
    """Collectives of one kind in one call of a program, per device."""

    count: int = 0
    bytes: float = 0.0  # of the exchanged arrays
    sent_bytes: float = 0.0  # within its slice
    dcn_bytes: float = 0.0  # to other slices


def traffic(
    program: Program, *, num_devices: int, num_slices: int = 1
) -> dict[str, Traffic]:
    """Return the collectives of a program by kind.

    An asynchronous collective counts once, be it a pair of start and done or several
    fusions that share a channel.  One between slices counts in its stages: the devices
    of a slice exchange the array, and then each its part with the same device of the
    other slices.  TPUs compile the second stage to sends to the host's runtime.
    """
    found: dict[str, Traffic] = {}
    pieces: dict[tuple[str, str], tuple[int, float, tuple[int, int]]] = {}
    for number, (each, within, times) in enumerate(program.runs()):
        kind = each.op.removesuffix("-start")
        if each.op == "send" and (named := _MEGASCALE.search(each.rest)):
            kind = named[1].lower().replace("_", "-")
            size = max(map(shape_bytes, _ARRAY.findall(each.shape)))
            size *= num_slices if kind == "all-gather" else 1
            pieces[kind, f"send {number}"] = (times, size, (1, num_slices))
            continue
        if kind not in SENT:
            continue
        size = _whole_bytes(each.op, each.shape)
        groups = replica_groups(each.rest, num_devices)
        if each.op == "reduce-scatter":  # a start has its operands, too
            size *= groups.shape[1]
        of_slices = groups * num_slices // num_devices
        across = max(len(set(members)) for members in of_slices.tolist())
        stages = (groups.shape[1] // across, across)
        if kind == "all-reduce" and "all-reduce-scatter" in within:
            kind = "reduce-scatter"  # TPUs fuse it in this form
        channel = each.attribute("channel_id") or f"number {number}"
        before = pieces.get((kind, channel), (0, 0.0, (1, 1)))
        pieces[kind, channel] = max(before, (times, size, stages))
    for (kind, _), (times, size, (within, across)) in pieces.items():
        if within * across == 1:
            continue
        sums = found.setdefault(kind, Traffic())
        sums.count += times
        sums.bytes += times * size
        if within > 1:
            sums.sent_bytes += times * SENT[kind](size, within)
        if across > 1:
            sums.dcn_bytes += times * SENT[kind](size / within, across)
    return found


def _whole_bytes(op: str, shape: str) -> float:
    """Return the exchanged arrays' bytes; a start's shape has operands and results."""
    if not op.endswith("-start") or op == "all-reduce-start":
        return shape_bytes(shape)
    arrays = [each for each in _ARRAY.findall(shape) if not each.endswith("[]")]
    sizes, half = list(map(shape_bytes, arrays)), len(arrays) // 2
    return max(sum(sizes[:half]), sum(sizes[half:]))


def replica_groups(attributes: str, num_devices: int) -> np.ndarray:
    """Return the numbers of the devices in each group that exchanges data, a row each.

    A permutation has a group for each pair of sender and receiver.
    """
    listed = r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}"
    if found := re.search(listed, attributes):
        groups = re.findall(r"[\d,]+", found[1].replace("},{", "} {"))
        return np.array([list(map(int, group.split(","))) for group in groups])
    if found := re.search(rf"replica_groups={_IOTA}<={_IOTA}", attributes):
        shape, sides, order = map(_numbers, (found[1], found[3], found[4]))
        return _devices(sides, order).reshape(shape)
    mesh = rf"replica_groups=mesh\[(.*?)\](?:, device_ids=\({_IOTA}\))? ?\{{(.*?)\}}"
    if found := re.search(mesh, attributes):
        sizes = re.findall(r"'(\w+)'=(\d+)", found[1])
        shape = [int(size) for _, size in sizes]
        names = re.findall(r"'(\w+)'", found[4])
        within = [at for at, (name, _) in enumerate(sizes) if name in names]
        devices = _devices(_numbers(found[2]) or shape, _numbers(found[3]))
        moved = np.moveaxis(devices.reshape(shape), within, range(-len(within), 0))
        return moved.reshape(-1, math.prod(shape[at] for at in within))
    return np.arange(num_devices)[None]


def _numbers(text: str | None) -> list[int] | None:
    return [int(each) for each in text.split(",")] if text else None


def _devices(sides: list[int] | None, order: list[int] | None) -> np.ndarray:
    """Return device numbers as XLA writes them: counted along sides, transposed."""
    assert sides is not None, "every form has them"
    counted = np.arange(math.prod(sides)).reshape(sides)
    return counted if order is None else counted.transpose(order)
