"""Compiled programs as XLA prints them: their instructions, and how often each runs."""

import dataclasses
import math
import re
from collections.abc import Iterator

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$"
)
_CALLED = re.compile(
    r"\b(?:calls|body|condition|to_apply|true_computation|false_computation)="
    r"%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_KNOWN = re.compile(r'"?known_trip_count"?:\{"?n"?:"?(\d+)')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    op: str
    rest: str  # operands and attributes

    @property
    def operands(self) -> list[str]:
        """Names of what it takes."""
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])

    @property
    def called(self) -> list[str]:
        """Computations that it runs."""
        branches = _BRANCHES.search(self.rest)
        names = re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
        return [*_CALLED.findall(self.rest), *names]

    def attribute(self, name: str) -> str | None:
        """A word after `name=`."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Program:
    """Computations by name, and the one that runs first."""

    computations: dict[str, list[Instruction]]
    entry: str

    def runs(self) -> Iterator[tuple[Instruction, str, int]]:
        """Every instruction, its computation, and how often it runs in one call.

        A loop whose bound depends on data is counted at the greatest bound that its
        condition names; one without any runs once.
        """
        yield from self._runs(self.entry, 1)

    def _runs(self, name: str, times: int) -> Iterator[tuple[Instruction, str, int]]:
        for instruction in self.computations[name]:
            yield instruction, name, times
            inside = times
            if instruction.op == "while":
                inside *= self._trips(instruction, name)
            for called in instruction.called:
                if called in self.computations:
                    yield from self._runs(called, inside)

    def _trips(self, loop: Instruction, within: str) -> int:
        known = _KNOWN.search(loop.rest)
        if known:
            return int(known[1])
        condition = loop.attribute("condition")
        bounds = list(self._bounds(condition)) if condition else []
        if not bounds:
            return 1
        place, bound = max(bounds, key=lambda each: each[1])
        length = bound - self._start(loop, within, place)
        return max(1, -(-length // self._stride(loop, place)))

    def _stride(self, loop: Instruction, place: int | None) -> int:
        """What a turn adds to the counter; 1 where that cannot be read."""
        inside = self._in(loop.attribute("body") or "")
        by_name = {each.name: each for each in inside}
        if place is None or not inside or inside[-1].op != "tuple":
            return 1
        after = by_name.get(inside[-1].operands[place])
        if after is None or after.op != "add":
            return 1
        added = (by_name[name] for name in after.operands if name in by_name)
        return next((step for step in map(_constant, added) if step), 1)

    def _bounds(self, condition: str) -> Iterator[tuple[int | None, int]]:
        """(place of the counter in the loop's tuple, bound) of `counter < bound`."""
        inside = self.computations.get(condition, [])
        by_name = {each.name: each for each in inside}
        for each in inside:
            compared = [by_name[name] for name in each.operands if name in by_name]
            constants = [found for found in map(_constant, compared) if found]
            if each.op == "compare" and "direction=LT" in each.rest and constants:
                counters = (one for one in compared if one.op == "get-tuple-element")
                index = next((one.attribute("index") for one in counters), None)
                yield (int(index) if index else None), constants[0]
            elif each.op == "fusion":
                # The comparison is inside, its bound may be outside.
                for called in each.called:
                    for place, bound in self._bounds(called):
                        yield None if place is not None else place, bound
                    if any("direction=LT" in one.rest for one in self._in(called)):
                        yield from ((None, bound) for bound in constants)

    def _in(self, name: str) -> list[Instruction]:
        return self.computations.get(name, [])

    def _start(self, loop: Instruction, within: str, place: int | None) -> int:
        """Where the counter begins; 0 where that cannot be read."""
        by_name = {each.name: each for each in self._in(within)}
        packed = by_name.get(loop.operands[0]) if loop.operands else None
        if place is None or packed is None or packed.op != "tuple":
            return 0
        if place >= len(packed.operands):
            return 0
        first = by_name.get(packed.operands[place])
        return (_constant(first) or 0) if first else 0


def _constant(instruction: Instruction) -> int | None:
    found = re.match(r"(\d+)\)", instruction.rest)
    return int(found[1]) if instruction.op == "constant" and found else None


def parse(text: str) -> Program:
    """The program that XLA has printed."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in _whole_lines(text):
        begins = _COMPUTATION.match(line)
        if begins:
            current = computations.setdefault(begins[2], [])
            entry = begins[2] if begins[1] else entry
        elif line == "}":
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append(Instruction(*found.groups()))
    return Program(computations, entry)


def _whole_lines(text: str) -> Iterator[str]:
    """Lines of instructions and computations; some attributes contain line ends."""
    held = ""
    for line in text.splitlines():
        if held and re.match(
            r"\s+(ROOT )?%?[\w.\-]+ = |[%\w.\-]+ .*\{$|ENTRY |\}$", line
        ):
            yield held
            held = line
        else:
            held = f"{held} {line}" if held else line
    yield held


def shape_bytes(shape: str) -> int:
    """Of an array, or of all arrays of a tuple."""
    return sum(
        math.prod(int(extent) for extent in extents.split(",") if extent)
        * _bits(dtype)
        // 8
        for dtype, extents, _ in _SHAPE.findall(shape)
    )


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    return int(re.search(r"\d+", dtype)[0])  # type: ignore[index]
