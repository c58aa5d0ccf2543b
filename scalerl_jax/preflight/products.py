"""Find matmuls that a compiler made costly (excess FLOPs) or inexact (narrow sums).

A compiler may compute more than the program requests (a grouped matmul as a dense one),
and may split a contraction into pieces whose sum it keeps in a narrow type.  It reports
no error for either, and neither happens on the CPU that runs the tests.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

from scalerl_jax.preflight.hlo import Instruction, Program, extents

# Report a product if its compiled FLOPs exceed this multiple of the requested FLOPs.
MOST_WASTE = 1.5
_PRODUCTS = ("dot", "convolution", "ragged-dot")
_NARROW = re.compile(r"(bf16|f16|f8\w*)\[")
# Operations that leave a value unchanged, apart from rounding.
_UNCHANGED = ("bitcast", "copy", "convert", "reshape", "transpose", "slice")


@dataclasses.dataclass(frozen=True)
class Excess:
    """Products of one source line, on one device and in one call."""

    place: str  # file:line
    asked: float  # FLOPs that the program requests
    compiled: float  # FLOPs of the compiled program

    @property
    def ratio(self) -> float:
        """Compiled FLOPs over requested FLOPs."""
        return self.compiled / self.asked


def excesses(compiled: Program, asked: Program, *, num_devices: int) -> list[Excess]:
    """Return the source lines whose products cost over `MOST_WASTE` times the request.

    Args:
        compiled: the compiled program, for one device.
        asked: the same program before any compiler pass, with shapes of all devices.
        num_devices: devices that share the requested FLOPs.
    """
    wanted: dict[str, float] = collections.defaultdict(float)
    for place, flops, local in _flops(asked):
        wanted[place] += flops if local else flops / num_devices
    spent: dict[str, float] = collections.defaultdict(float)
    for place, flops, _ in _flops(compiled):
        spent[place] += flops
    found = [
        Excess(place, flops, spent[place])
        for place, flops in wanted.items()
        if place and spent[place] > MOST_WASTE * flops
    ]
    return sorted(found, key=lambda each: each.asked - each.compiled)


def _flops(program: Program) -> Iterator[tuple[str, float, bool]]:
    """Yield source line, FLOPs, and "is of one device" for every product."""
    yield from _flops_of(program, program.entry, 1, False)


def _flops_of(
    program: Program, name: str, times: int, local: bool
) -> Iterator[tuple[str, float, bool]]:
    # The name of a shard_map's computation; its shapes are those of one device.
    local = local or "manual_computation" in name
    inside = program.computations[name]
    for each in inside.values():
        if each.op in _PRODUCTS:
            yield program.place(each), times * product_flops(each, inside), local
        for called, turns in program.calls(each, name):
            yield from _flops_of(program, called, times * turns, local)


def product_flops(product: Instruction, inside: dict[str, Instruction]) -> float:
    """Return the FLOPs of a product: two for each pair of multiplied values.

    A grouped product multiplies each row by the matrix of its own group alone.
    """
    out, left, right = (
        extents(shape)
        for shape in (
            product.shape,
            *(inside[name].shape for name in product.operands[:2]),
        )
    )
    if product.op == "ragged-dot":
        return 2.0 * math.prod(left) * out[-1]
    if product.op == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", product.rest)
        sides = re.findall(r"\d+", contracted[1]) if contracted else []
        return 2.0 * math.prod(out) * math.prod(left[int(each)] for each in sides)
    return _convolution_flops(product.rest, out, left, right)


def _convolution_flops(
    attributes: str, out: list[int], left: list[int], right: list[int]
) -> float:
    """Return the FLOPs of a convolution, without those of padding and holes.

    On TPUs matmuls are convolutions: a batch may be a dimension of the window.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    assert labels, f"a convolution without dim_labels: {attributes[:200]}"
    of_left, of_right, of_out = labels.groups()
    window = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
    flops = 2.0 * out[of_out.index("b")] * out[of_out.index("f")]
    flops *= right[of_right.index("i")]
    sides = sorted(set(of_out) - set("bf"))

    def read(name: str, default: str) -> list[str]:
        return fields[name].split("x") if name in fields else [default] * len(sides)

    strides, pads = read("stride", "1"), read("pad", "0_0")
    holes, kernel_holes = read("lhs_dilate", "1"), read("rhs_dilate", "1")
    for number, side in enumerate(sides):
        flops *= _meetings(
            outputs=out[of_out.index(side)],
            inputs=left[of_left.index(side)],
            kernel=right[of_right.index(side)],
            stride=int(strides[number]),
            before=int(pads[number].split("_")[0]),
            spread=int(holes[number]),
            apart=int(kernel_holes[number]),
        )
    return flops


def _meetings(
    *,
    outputs: int,
    inputs: int,
    kernel: int,
    stride: int,
    before: int,
    spread: int,
    apart: int,
) -> int:
    """Count the (output, kernel tap) pairs along a side that read a real input."""
    last, count = (inputs - 1) * spread, 0
    for tap in range(kernel):
        # Output o meets the input at o * stride + offset.
        offset = tap * apart - before
        first = max(0, -(offset // stride))
        end = min(outputs - 1, (last - offset) // stride)
        if spread == 1:
            count += max(0, end - first + 1)
        else:
            reached = range(first, end + 1)
            count += sum((o * stride + offset) % spread == 0 for o in reached)
    return count


# -- sums in a narrow type -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Made:
    """Origins of a value in the body of a loop."""

    carried: frozenset[int] = frozenset()  # elements of the loop's tuple it depends on
    product: bool = False  # depends on a product
    sum: int = -1  # element that it equals, apart from added products; -1: none
    added: str = ""  # source line that added a product independent of that element
    elements: tuple["_Made", ...] = ()  # origins of the elements, if it is a tuple


def narrow_loops(program: Program) -> list[str]:
    """Return the source lines at which loops sum products in less than float32.

    Such a loop carries a sum in a narrow type; each iteration adds a product that does
    not depend on the sum: a contraction in pieces.  A residual stream is no such sum,
    since the output that a layer adds to it depends on it.
    """
    found: dict[str, None] = {}
    for inside in program.computations.values():
        for each in inside.values():
            if each.op != "while":
                continue
            shapes = re.findall(r"\w+\[[\d,]*\]", each.shape)
            start = _Made(
                elements=tuple(
                    _Made(frozenset({place}), sum=place) for place in range(len(shapes))
                )
            )
            after = _made(program, each.attribute("body") or "", [start]).elements
            for place, (shape, value) in enumerate(zip(shapes, after, strict=False)):
                if _NARROW.match(shape) and value.sum == place and value.added:
                    found[value.added] = None
    return list(found)


def _made(program: Program, name: str, arguments: list[_Made]) -> _Made:
    """Return the origins of a computation's result, given those of its arguments."""
    values: dict[str, _Made] = {}
    result = _Made()
    # XLA prints an instruction after its operands.
    for each in program.computations.get(name, {}).values():
        taken = [values[operand] for operand in each.operands if operand in values]
        result = values[each.name] = _made_by(program, each, taken, arguments)
    return result


def _made_by(
    program: Program, each: Instruction, taken: list[_Made], arguments: list[_Made]
) -> _Made:
    if each.op == "parameter":
        number = int(each.rest.split(")")[0])
        return arguments[number] if number < len(arguments) else _Made()
    if each.op == "get-tuple-element" and taken and taken[0].elements:
        return taken[0].elements[int(each.attribute("index") or 0)]
    if each.op == "tuple":
        return dataclasses.replace(_mixed(taken), elements=tuple(taken))
    if each.op in ("fusion", "call"):
        return _made(program, each.called[0], taken)
    if each.op in _UNCHANGED and taken:
        return taken[0]
    return _computed(program, each, taken)


def _computed(program: Program, each: Instruction, taken: list[_Made]) -> _Made:
    """Return the origins of an instruction's value, given those of its operands."""
    mixed = _mixed(taken)
    if each.op in _PRODUCTS:
        return dataclasses.replace(mixed, product=True)
    if each.op == "select":  # it starts the sum at zero in the first iteration
        sums = [one for one in taken[1:] if one.sum >= 0]
        if len(sums) == 1 and not any(sums[0].sum in one.carried for one in taken[:1]):
            return dataclasses.replace(mixed, sum=sums[0].sum, added=sums[0].added)
    if each.op == "add" and len(taken) == 2:
        for one, other in (taken, taken[::-1]):
            if one.sum >= 0 and one.sum not in other.carried:
                added = program.place(each) or each.name if other.product else ""
                return dataclasses.replace(mixed, sum=one.sum, added=added or one.added)
    return mixed


def _mixed(taken: list[_Made]) -> _Made:
    return _Made(
        frozenset().union(*(one.carried for one in taken)),
        any(one.product for one in taken),
    )
