"""What a compiled program sends between devices, and whether its head is float32."""

import dataclasses
import math
import re

from scalerl_jax.preflight.hlo import Program, shape_bytes

# Kind -> bytes that a device sends, of n devices that exchange an array; the array is
# the whole one: a reduce-scatter's operand, an all-gather's result.
SENT = {
    "all-gather": lambda size, n: size * (n - 1) / n,
    "all-reduce": lambda size, n: 2 * size * (n - 1) / n,
    "reduce-scatter": lambda size, n: size * (n - 1) / n,
    "all-to-all": lambda size, n: size * (n - 1) / n,
    "collective-permute": lambda size, n: size,
}


@dataclasses.dataclass
class Traffic:
    """Of one kind of collective, in one call of a program, on one device."""

    count: int = 0
    bytes: float = 0.0  # of the arrays that are exchanged
    sent_bytes: float = 0.0


def traffic(program: Program, *, num_devices: int) -> dict[str, Traffic]:
    """Collectives by kind.

    An asynchronous one counts once, whether it is a start and a done or is spread
    over several fusions (these share a channel).
    """
    found: dict[str, Traffic] = {}
    pieces: dict[tuple[str, str], tuple[int, float, int]] = {}
    for number, (each, within, times) in enumerate(program.runs()):
        kind = each.op.removesuffix("-start")
        if kind not in SENT:
            continue
        size, group = _whole_bytes(each.op, each.shape), _group(each.rest, num_devices)
        if kind == "reduce-scatter":
            size *= group
        if kind == "all-reduce" and "all-reduce-scatter" in within:
            kind = "reduce-scatter"  # as TPUs fuse it
        channel = each.attribute("channel_id") or f"number {number}"
        before = pieces.get((kind, channel), (0, 0.0, 1))
        pieces[kind, channel] = max(before, (times, size, group))
    for (kind, _), (times, size, group) in pieces.items():
        if group == 1:
            continue
        sums = found.setdefault(kind, Traffic())
        sums.count += times
        sums.bytes += times * size
        sums.sent_bytes += times * SENT[kind](size, group)
    return found


def _whole_bytes(op: str, shape: str) -> float:
    """Of what is exchanged; the start of an asynchronous one has operand and result."""
    if not op.endswith("-start"):
        return shape_bytes(shape)
    if op == "all-reduce-start":
        return shape_bytes(shape)
    arrays = re.findall(r"\w+\[[\d,]*\]", shape)
    return max(map(shape_bytes, arrays))


def _group(attributes: str, num_devices: int) -> int:
    """Devices that exchange with each other."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        names = re.findall(r"'(\w+)'", found[2])
        return math.prod(int(sizes[name]) for name in names)
    return num_devices


@dataclasses.dataclass(frozen=True)
class HeadMatmuls:
    """The matmuls of a program's head, by how they are computed."""

    highest: int  # a float32 result at the highest precision
    lower: int

    @property
    def float32(self) -> bool:
        """Whether none is computed with less; true of a program without a head."""
        return self.lower == 0


def head_matmuls(program: Program, *, vocabulary: set[int]) -> HeadMatmuls:
    """Matmuls of which an operand or the result has a side in `vocabulary`.

    Those are the sides that a part of the vocabulary has in no other array.  At the
    highest precision an operand may be bfloat16: the compiler then found that its
    float32 values are bfloat16 ones, and takes the cast away.
    """
    highest = lower = 0
    for inside in program.computations.values():
        shapes = {each.name: each.shape for each in inside}
        for each in inside:
            if each.op not in ("dot", "convolution"):
                continue
            arrays = [each.shape, *(shapes.get(name, "") for name in each.operands)]
            brackets = "".join(re.findall(r"\[[\d,]*\]", " ".join(arrays)))
            if not {int(side) for side in re.findall(r"\d+", brackets)} & vocabulary:
                continue
            exact = "operand_precision={highest,highest}" in each.rest
            if exact and each.shape.startswith("f32["):
                highest += 1
            else:
                lower += 1
    return HeadMatmuls(highest, lower)
