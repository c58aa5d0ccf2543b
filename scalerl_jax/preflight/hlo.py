"""Read compiled programs: memory, loops, and precision of the head.

Instructions come from XLA's text form, sizes from the compiler's statistics.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalerl_jax.machines.chips import Chip
from scalerl_jax.model.products import TERMS
from scalerl_jax.parallel.xla import is_full
from scalerl_jax.preflight.gpus import COMPILER_OPTIONS
from scalerl_jax.process.printing import to_stderr

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_DIGITS = re.compile(r"\d+")
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_BEGINNING = re.compile(r"\s+(ROOT )?%?[\w.\-]+ = |[%\w.\-]+ .*\{$|ENTRY |\}$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
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
        """Names of the operands."""
        taken = self.rest.split("), ")[0]
        # Names in a program that was not compiled have no % sign.
        return re.findall(r"%([\w.\-]+)", taken) or re.findall(r"[\w.\-]+", taken)

    @property
    def called(self) -> list[str]:
        """Names of the computations that the instruction runs."""
        branches = _BRANCHES.search(self.rest)
        names = re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
        return [*_CALLED.findall(self.rest), *names]

    def attribute(self, name: str) -> str | None:
        """Return the word after `name=`."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Program:
    """Computations by name, the instructions of each by name, and the entry."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    places: dict[str, str] = dataclasses.field(default_factory=dict)  # frame: file:line

    def place(self, instruction: Instruction) -> str:
        """Return the source line of an instruction, as file:line, or ""."""
        return self.places.get(instruction.attribute("stack_frame_id") or "", "")

    def calls(self, instruction: Instruction, within: str) -> Iterator[tuple[str, int]]:
        """Yield each computation that an instruction runs, with its number of runs."""
        times = self._trips(instruction, within) if instruction.op == "while" else 1
        for called in instruction.called:
            if called in self.computations:
                yield called, times

    def runs(self) -> Iterator[tuple[Instruction, str, int]]:
        """Yield each instruction, its computation, and its runs in one call.

        A loop whose bound depends on data counts at the greatest bound in its
        condition; a loop without a bound counts as one run.
        """
        yield from self._runs(self.entry, 1)

    def _runs(self, name: str, times: int) -> Iterator[tuple[Instruction, str, int]]:
        for instruction in self.computations[name].values():
            yield instruction, name, times
            for called, turns in self.calls(instruction, name):
                yield from self._runs(called, times * turns)

    def _trips(self, loop: Instruction, within: str) -> int:
        if known := _KNOWN.search(loop.rest):
            return int(known[1])
        bounds = list(self._bounds(loop.attribute("condition") or ""))
        if not bounds:
            return 1
        place, bound = max(bounds, key=lambda each: each[1])
        start = self._element(within, next(iter(loop.operands), ""), place)
        length = bound - ((_constant(start) or 0) if start else 0)
        return max(1, -(-length // self._stride(loop, place)))

    def _stride(self, loop: Instruction, place: int | None) -> int:
        """Return a loop counter's increment; 1 if it cannot be read."""
        body = loop.attribute("body") or ""
        inside = self.computations.get(body, {})
        after = self._element(body, next(reversed(inside), ""), place)
        if after is None or after.op != "add":
            return 1
        added = (inside[name] for name in after.operands if name in inside)
        return next((step for step in map(_constant, added) if step), 1)

    def _element(self, within: str, name: str, place: int | None) -> Instruction | None:
        """Return the instruction of element `place` of tuple `name`; None: unknown."""
        inside = self.computations.get(within, {})
        packed = inside.get(name)
        if place is None or packed is None or packed.op != "tuple":
            return None
        return inside.get(dict(enumerate(packed.operands)).get(place, ""))

    def _bounds(self, condition: str) -> Iterator[tuple[int | None, int]]:
        """Yield (counter's index in the tuple, bound) of each `counter < bound`."""
        inside = self.computations.get(condition, {})
        for each in inside.values():
            compared = [inside[name] for name in each.operands if name in inside]
            constants = [found for found in map(_constant, compared) if found]
            if each.op == "compare" and "direction=LT" in each.rest and constants:
                counters = (one for one in compared if one.op == "get-tuple-element")
                index = next((one.attribute("index") for one in counters), None)
                yield (int(index) if index else None), constants[0]
            elif each.op == "fusion":
                # The comparison is in the fusion; its bound may be outside.
                for called in each.called:
                    yield from ((None, bound) for _, bound in self._bounds(called))
                    theirs = self.computations.get(called, {}).values()
                    if any("direction=LT" in one.rest for one in theirs):
                        yield from ((None, bound) for bound in constants)


def _constant(instruction: Instruction) -> int | None:
    found = re.match(r"(\d+)\)", instruction.rest)
    return int(found[1]) if instruction.op == "constant" and found else None


def parse(text: str) -> Program:
    """Parse the text of a program that XLA printed."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in _whole_lines(text):
        begins = _COMPUTATION.match(line)
        if begins:
            current = computations.setdefault(begins[2], {})
            entry = begins[2] if begins[1] else entry
        elif line == "}":
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current[found[1]] = Instruction(*found.groups())
    return Program(computations, entry, _places(text))


def _places(text: str) -> dict[str, str]:
    """Return stack frame -> innermost source line, from a program's header."""
    files = dict(
        re.findall(r'^(\d+) "(.*)"$', text.split("\n\nFunctionNames")[0], re.M)
    )
    location = r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)"
    lines = {
        number: f"{files.get(file, '?')}:{line}"
        for number, file, line in re.findall(location, text, re.M)
    }
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", text, re.M)
    return {frame: lines.get(at, "") for frame, at in frames}


def _whole_lines(text: str) -> Iterator[str]:
    """Yield whole lines of a program; join those that an attribute's newline split."""
    held = ""
    for line in text.splitlines():
        if held and _BEGINNING.match(line):
            yield held
            held = line
        else:
            held = f"{held} {line}" if held else line
    yield held


def extents(shape: str) -> list[int]:
    """Return the dimensions of an array's shape."""
    found = _SHAPE.search(shape)
    return [int(each) for each in _DIGITS.findall(found[2])] if found else []


def shape_bytes(shape: str) -> int:
    """Return the bytes of an array, or of all arrays of a tuple."""
    return sum(
        math.prod(int(extent) for extent in extents.split(",") if extent)
        * (_BITS[dtype] if dtype in _BITS else int(_DIGITS.findall(dtype)[0]))
        // 8
        for dtype, extents in _SHAPE.findall(shape)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled program and its bytes on a device, or why it did not compile."""

    program: Program | None
    asked: Program | None = None  # before any compiler pass, with shapes of all devices
    kept: int = 0  # arguments and results; a result in a donated argument counts once
    temporaries: int = 0  # at the peak
    code: int = 0
    too_large: str = ""  # the compiler's message; empty: it compiled


def compile_program(name: str, lowered: Any, chip: Chip | None = None) -> Compiled:
    """Compile a lowered program; too large a program is a result, not an error.

    Temporaries come from the compiler's peak.  Its total of temporaries counts arrays
    twice that a loop updates in place, and so exceeds what it allocates.

    Args:
        name: is printed to stderr.
        lowered: the program.
        chip: of the devices; None: a TPU, or this machine's.

    Raises:
        ValueError: the compiler refuses the program for another reason.
    """
    to_stderr(f"compiling {name}\n")
    try:
        on_gpu = chip is not None and chip.platform == "gpu"
        compiled = lowered.compile(
            compiler_options=COMPILER_OPTIONS if on_gpu else None
        )
    except jax.errors.JaxRuntimeError as error:
        words = " ".join(str(error).split())[:400]
        if not is_full(error):
            raise ValueError(
                f"the compiler refuses {name} on these devices: {words}; try other "
                f"sizes of mesh.* or another --topology"
            ) from error
        return Compiled(program=None, too_large=words)
    stats = compiled.memory_analysis()
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes
    kept -= stats.alias_size_in_bytes
    peak = getattr(stats, "peak_memory_in_bytes", 0)
    return Compiled(
        program=parse(compiled.as_text()),
        asked=parse(lowered.as_text(dialect="hlo", debug_info=True)),
        kept=kept,
        temporaries=max(0, peak - kept) if peak else stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )


def memory_limit(device: Any, chip: Chip) -> int:
    """Return the bytes that a program may use on a device, as the compiler reports it.

    A TPU's compiler states the limit when it refuses a program that is far too large.
    Without such a statement the result is `chip.program_bytes`.
    """
    if chip.platform == "gpu":
        return int(chip.program_bytes)
    mesh = Mesh([device], ("alone",))
    sharding = NamedSharding(mesh, PartitionSpec())
    huge = jax.ShapeDtypeStruct((2**20, 2**18), jnp.float32, sharding=sharding)
    try:
        jax.jit(lambda x: x + 1).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"exceeds available HBM \(([\d.]+)([MGT])\)", str(error))
        if found:
            unit = {"M": 2**20, "G": 2**30, "T": 2**40}[found[2]]
            return int(float(found[1]) * unit)
    return int(chip.program_bytes)


# -- the head --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HeadMatmuls:
    """Numbers of matmuls, of a head or router, by their precision."""

    highest: int  # with a float32 result, at the highest precision
    high: int  # with a float32 result, of 16 bits of each operand, for gradients
    lower: int  # all others

    def below_float32(self, *, gradients: bool = False) -> int:
        """Return the matmuls below float32; `gradients` may be of 16 bits."""
        return self.lower + self.high * (not gradients)


def scope_matmuls(program: Program, scope: str) -> HeadMatmuls:
    """Count the matmuls within a `jax.named_scope`, by precision."""
    within = re.compile(rf'op_name="[^"]*\b{scope}\b')
    return _count_matmuls(program, lambda each, _: bool(within.search(each.rest)))


def head_matmuls(program: Program, *, vocabulary: set[int]) -> HeadMatmuls:
    """Count the matmuls whose operands or result have a dimension in `vocabulary`.

    Only arrays of the head have these dimensions: sizes of vocabulary shards.
    """

    def has_side(each: Instruction, inside: dict[str, Instruction]) -> bool:
        operands = [inside[name].shape for name in each.operands if name in inside]
        found = _SHAPE.findall(" ".join([each.shape, *operands]))
        sides = _DIGITS.findall(" ".join(sides for _, sides in found))
        return not vocabulary.isdisjoint(map(int, sides))

    return _count_matmuls(program, has_side)


def _count_matmuls(
    program: Program, wanted: Callable[[Instruction, dict[str, Instruction]], bool]
) -> HeadMatmuls:
    """Count by precision the matmuls for which `wanted(matmul, its computation)`.

    At a higher precision an operand may be bfloat16: the compiler removes a cast to
    float32 from bfloat16.  So may those of `products.by_terms`, in its scope; they
    count as the highest.
    """
    found = collections.Counter(
        _precision(each)
        for inside in program.computations.values()
        for each in inside.values()
        if each.op in ("dot", "convolution") and wanted(each, inside)
    )
    return HeadMatmuls(**{name: found[name] for name in ("highest", "high", "lower")})


def _precision(matmul: Instruction) -> str:
    above = above_default(matmul.rest) if matmul.shape.startswith("f32[") else ""
    return above or "lower"


def above_default(text: str) -> str:
    """Return "highest" or "high", the precision in a matmul's text; "": the default."""
    if "operand_precision={highest,highest}" in text or TERMS in text:
        return "highest"
    return "high" if "operand_precision={high,high}" in text else ""
