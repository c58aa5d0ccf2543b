"""Values of expressions, and whether two agree.

Rational values are computed exactly, others to 80 digits.  Variables get fixed rational
values: expressions that agree at generic points are equal.  An expression that is too
large to compute, or is not in `grammar`, has no value here.

The file is above 400 lines: every operation is beside its bound.
"""

import dataclasses
import functools
import hashlib
import math
import operator
import re
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

from scalerl_jax.environments.judges.grammar import (
    FUNCTIONS,
    ExpressionReader,
    Tree,
    Unreadable,
    has_names,
)

_DIGITS = 80
_MAX_DIGITS = 20_000  # from here on a number is compared to its last whole digits
_EQUAL = Fraction(1, 10**40)  # relative; far from rounding and from chance
_DECIMALS = Fraction(5, 10**7)  # most that rounding to 6 decimals changes
_SIGNIFICANT = Fraction(5, 10**6)  # and to 6 significant digits, relatively
_MAX_BITS = 100_000  # of a power
_MAX_EXACT_BITS = 400_000  # of the operands of one operation
_MAX_CPU_S = 1.0  # for all operations of an expression
_MAX_FACTORIAL = 10_000
_MAX_OPERAND = 1000  # exponent, bound or factorial that a computer algebra is given
_MAX_GROWING = 100  # the same, where a sum's or product's terms grow like powers
_MAX_ARGUMENT = 10**6  # of functions but logarithms
_POINTS = 2  # that expressions with variables are compared at
_FURTHER_POINTS = 6  # for those that jump, with values larger by this factor, which
_FURTHER = 11  # is odd: (-1)^n is -1 at some of them

_GROUP = r"(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\d+|\\?[A-Za-z]+)"
_OPERANDS = re.compile(
    rf"\^\s*(?P<exponent>{_GROUP}(?:\s*\^\s*{_GROUP})*)"
    r"|_\s*\{[^{}=]*=(?P<bound>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
    r"|(?P<factor>\d+|[A-Za-z]|\([^()]*\)|\{[^{}]*\})\s*!"
    rf"|\\binom\s*(?P<chosen>{_GROUP})"
)
_INDEX = re.compile(r"_\s*\{\s*(\\?[A-Za-z]+)\s*=")  # of a sum or a product
_TEN = r"10\s*\^\s*(?:\{\s*[-+]?\d+\s*\}|[-+]?\d+)"
_MANTISSA = r"(?:\d+(?:\.\d+)?|\.\d+)"
_SCIENTIFIC = re.compile(
    rf"\s*[-+]?\s*(?:{_MANTISSA}(?:[eE][-+]?\d+|\s*(?:\\times|\\cdot|\*)\s*{_TEN})"
    rf"|{_TEN})\s*"
)


_INFINITY = r"\infty"
_INFINITE = (("name", _INFINITY), ("-", ("number", Fraction(0)), ("name", _INFINITY)))


class TooLarge(Unreadable):
    """The value of an expression of this grammar is too costly to compute."""


Number = Any  # Fraction, or mpmath's mpf or mpc, which have no types


@dataclasses.dataclass(frozen=True)
class Value:
    """The value of an expression."""

    tree: Tree
    points: tuple[Number, ...]  # one number, or one for each point with variables
    decimal: bool  # some number in it has a decimal point, and may be rounded
    scientific: bool  # it is a mantissa and a power of ten
    doubtful: bool  # it can be read in several ways

    @property
    def constant(self) -> bool:
        """Return whether the value holds no variables."""
        return len(self.points) == 1

    @property
    def is_named(self) -> bool:
        """Return whether the value is a name: x, f(2), |AB|."""
        return _is_named(self.tree)


def _is_named(tree: Tree) -> bool:
    if tree[0] in ("*", "abs"):
        return all(map(_is_named, tree[1:]))
    return tree[0] in ("name", "unknown")


def evaluate(text: str) -> Value | None:
    """Compute the value of an expression; None without one."""
    found = _evaluated(text)
    return found if isinstance(found, Value) else None


def is_bounded(text: str) -> bool:
    """Return whether all parts of a text are small enough for computer algebra.

    Then no expression in brackets is too large to compute, and no exponent, bound
    of a sum or product, or operand of a factorial is above `_MAX_OPERAND`, or where
    one of them has the index of a sum or product in it, above `_MAX_GROWING`.  Double
    factorials have no bounds there: it takes the factorial twice.
    """
    if re.search(r"!\s*!", text):
        return False
    parts, opened = [text], []
    for place, character in enumerate(text):
        if character in "([{":
            opened.append(place + 1)
        elif character in ")]}" and opened:
            parts.append(text[opened.pop() : place])
    written = [found[found.lastgroup or 0] for found in _OPERANDS.finditer(text)]
    operands = map(evaluate, written)
    indices = _INDEX.findall(text)
    grows = any(_holds(operand, indices) for operand in written)
    most = _MAX_GROWING if grows else _MAX_OPERAND
    return not any(isinstance(_evaluated(part), TooLarge) for part in parts) and all(
        abs(operand.points[0]) <= most
        for operand in operands
        if operand and operand.constant
    )


def _holds(text: str, names: list[str]) -> bool:
    r"""Return whether one of these names, k or \ell, is in a text."""
    letters = re.sub(r"\\[A-Za-z]+", " ", text)
    return any(name in (text if name[0] == "\\" else letters) for name in names)


@functools.lru_cache(maxsize=4096)
def _evaluated(text: str) -> Value | TooLarge | None:
    try:
        reader = ExpressionReader(text)
        tree = reader.read()
        if _INFINITY in reader.names and tree not in _INFINITE:
            return None  # no letter like others: \infty/\infty is not 1
        with mpmath.workdps(_DIGITS):
            points = tuple(
                _Point(number).value(tree)
                for number in range(_POINTS if reader.names else 1)
            )
    except TooLarge as error:
        return error
    except (Unreadable, ArithmeticError, ValueError, TypeError, RecursionError):
        return None
    if not all(isinstance(each, Fraction) or mpmath.isfinite(each) for each in points):
        return None
    return Value(
        tree,
        points,
        decimal=reader.decimal,
        scientific=_SCIENTIFIC.fullmatch(text) is not None,
        doubtful=reader.doubtful,
    )


def same_value(one: Value, other: Value) -> bool | None:
    """Return whether two values are equal; None if that cannot be decided here.

    Whole numbers are equal if they are the same.  Where a number has a decimal point,
    both agree to 6 decimals and to 6 significant digits, and in scientific notation
    to the latter alone.
    """
    relative, absolute = _limits(one, other)
    pairs = zip(one.points * _POINTS, other.points * _POINTS, strict=False)
    with mpmath.workdps(_DIGITS):
        agreed = [_agree(a, b, relative, absolute) for a, b in pairs]
        if all(agreed) and (_jumps(one.tree) or _jumps(other.tree)):
            return _agree_further(one, other, relative, absolute)
        if all(agreed) and (absolute or relative == _EQUAL):
            return _agree_to_units(one, other, absolute or _EQUAL)
        if all(agreed) or _vanish(one, other):
            return True
    return None if any(agreed) or one.doubtful or other.doubtful else False


def _jumps(tree: Tree) -> bool:
    """Return whether a tree has steps or signs in it that change with its variables.

    These are floors, ceilings, and powers like (-1)^n.
    """
    if tree[0] in ("floor", "ceil"):
        return True
    if tree[0] == "^" and tree[1][0] not in ("number", "e", "pi"):
        if has_names(tree[2]) and not has_names(tree[1]):
            return True
    return any(_jumps(part) for part in tree if isinstance(part, tuple))


def _agree_further(
    one: Value, other: Value, relative: Fraction, absolute: Fraction | None
) -> bool | None:
    """Compare what jumps at more and larger values: near 1 many floors are 0.

    None if the values there are too large.
    """
    if one.constant and other.constant:
        return True
    points = map(_Point, range(_POINTS, _POINTS + _FURTHER_POINTS))
    try:
        return all(
            _agree(point.value(one.tree), point.value(other.tree), relative, absolute)
            for point in points
        )
    except (Unreadable, ArithmeticError, ValueError):
        return None


def _agree_to_units(one: Value, other: Value, apart: Fraction) -> bool | None:
    """Compare large numbers that agree in their first digits: e^2010 and e^2010 + 1.

    None if that takes too many digits.
    """
    pairs = zip(one.points * _POINTS, other.points * _POINTS, strict=False)
    for place, (a, b) in enumerate(pairs):
        size = abs(a)
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            continue
        if _inexact(size) < _inexact(1 / _EQUAL):
            continue
        digits = _DIGITS + int(mpmath.log10(_inexact(size)))
        if digits > _MAX_DIGITS:
            return None
        with mpmath.workdps(digits):
            point = _Point(place)
            a, b = _inexact(point.value(one.tree)), _inexact(point.value(other.tree))
            if abs(a - b) > _inexact(apart):
                return False
    return True


def is_about(one: Value, other: Value) -> bool:
    """Return whether two numbers differ by a hundredth at most."""
    with mpmath.workdps(_DIGITS):
        return _agree(one.points[0], other.points[0], Fraction(1, 100), None)


def _limits(one: Value, other: Value) -> tuple[Fraction, Fraction | None]:
    """Largest distance of two values: relative to the larger one, and absolute."""
    if one.scientific and other.scientific:
        return _SIGNIFICANT, None
    whole = all(_is_whole(each.points[0]) for each in (one, other))
    if whole or not (one.decimal or other.decimal):
        return _EQUAL, None
    if any(each.scientific and each.decimal for each in (one, other)):
        return _SIGNIFICANT, None
    return _SIGNIFICANT, _DECIMALS


def _agree(a: Number, b: Number, relative: Fraction, absolute: Fraction | None) -> bool:
    if not (isinstance(a, Fraction) and isinstance(b, Fraction)):
        a, b = _inexact(a), _inexact(b)
        relative, absolute = _inexact(relative), absolute and _inexact(absolute)
    elif relative == _EQUAL:
        return a == b
    if a == b:
        return True
    size = max(abs(a), abs(b))
    apart = abs(a - b)
    return apart <= relative * size and (absolute is None or apart <= absolute)


def _vanish(one: Value, other: Value) -> bool:
    """Return whether both are 0 but for rounding, which more digits make smaller."""
    return all(
        _is_zero(number, each.tree, place)
        for each in (one, other)
        for place, number in enumerate(each.points)
    )


def _is_zero(number: Number, tree: Tree, place: int) -> bool:
    """Return whether a tree is 0, but for rounding, at the point of this number."""
    size = abs(number)
    if size == 0:
        return True
    if isinstance(size, Fraction) or size > _inexact(_EQUAL):
        return False
    with mpmath.workdps(2 * _DIGITS):
        finer = abs(_inexact(_Point(place).value(tree)))
        return bool(finer <= size * _inexact(_EQUAL))


def proportional(one: Value, other: Value) -> bool:
    """Return whether one expression is a multiple of the other, and neither is 0."""
    if one.constant or other.constant or 0 in (*one.points, *other.points):
        return False
    with mpmath.workdps(_DIGITS):
        first, second = map(_divide, one.points, other.points)
        return _agree(first, second, _EQUAL, None)


class _Point:
    """A value for every variable; positive ones at the first point, 1 to 3 at two."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._end = time.process_time() + _MAX_CPU_S

    def value(self, tree: Tree) -> Number:
        """Compute the value of a tree."""
        kind, *parts = tree
        if time.process_time() > self._end:
            raise TooLarge("too much to compute")
        if kind == "number":
            return parts[0]
        if kind == "name":
            return self._variable(parts[0])
        if kind == "function":
            argument = _inexact(self.value(parts[1]))
            if parts[0] not in ("ln", "log", "lg") and abs(argument) > _MAX_ARGUMENT:
                raise TooLarge("a large argument")
            return _FUNCTIONS[parts[0]](argument)
        if kind == "unknown":  # a function that differs from all others
            name = _inexact(self._variable(parts[0] + "("))
            return mpmath.sin(name * _inexact(self.value(parts[1])) + name)
        return _OPERATIONS[kind](*[self.value(part) for part in parts])

    def _variable(self, name: str) -> Fraction:
        digest = hashlib.sha256(f"{self._number} {name}".encode()).digest()
        value = 1 + Fraction(int.from_bytes(digest[:2], "big"), 32_749)
        if self._number >= _POINTS:
            value *= _FURTHER
        return -value if self._number and digest[2] % 2 else value


_ARCS = {f"arc{name}": f"a{name}" for name in "sin cos tan cot sec csc".split()}
_NAMED_OTHERWISE = {**_ARCS, "ln": "log", "lg": "log10"}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    name: getattr(mpmath, _NAMED_OTHERWISE.get(name, name)) for name in FUNCTIONS
}


def _is_whole(value: Number) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1


def _inexact(value: Number) -> Number:
    if isinstance(value, Fraction):
        return mpmath.mpf(value.numerator) / value.denominator
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _exactly(operation: Callable[[Any, Any], Any]) -> Callable[[Number, Number], Any]:
    """An operation that stays exact while its operands are."""

    def applied(a: Number, b: Number) -> Number:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            if sum(map(_bits, (a, b))) > _MAX_EXACT_BITS:
                raise TooLarge("a large number")
            return operation(a, b)
        return operation(_inexact(a), _inexact(b))

    return applied


def _raise(base: Number, exponent: Number) -> Number:
    if base == 0:
        if not isinstance(exponent, Fraction) or exponent < 0:
            raise Unreadable("a power of zero")
        return Fraction(exponent == 0)
    if isinstance(base, Fraction) and _is_whole(exponent):
        if _bits(base) * abs(exponent.numerator) <= _MAX_BITS:
            return base**exponent.numerator
    if isinstance(exponent, Fraction) and isinstance(base, Fraction):
        if base < 0 and exponent.denominator % 2:  # the real root
            sign = -1 if exponent.numerator % 2 else 1
            return sign * _inexact(_raise(-base, exponent))
    base, exponent = _inexact(base), _inexact(exponent)
    if abs(exponent * mpmath.log(base)) > _MAX_BITS:
        raise TooLarge("a large power")
    return mpmath.power(base, exponent)


def _divide(a: Number, b: Number) -> Number:
    return _exactly(operator.truediv)(a, b)


def _factorial(value: Number) -> Number:
    if abs(value) > _MAX_FACTORIAL:
        raise TooLarge("a large factorial")
    if _is_whole(value) and value >= 0:
        return Fraction(math.factorial(value.numerator))
    return mpmath.gamma(_inexact(value) + 1)


def _double_factorial(value: Number) -> Number:
    """n (n - 2) (n - 4) ..., down to 1 or 2."""
    if abs(value) > _MAX_FACTORIAL:
        raise TooLarge("a large factorial")
    if not (_is_whole(value) and value >= 0):
        return mpmath.fac2(_inexact(value))
    half, odd = divmod(value.numerator, 2)
    even = 2**half * math.factorial(half)
    return Fraction(math.factorial(value.numerator) // even if odd else even)


def _choose(n: Number, k: Number) -> Number:
    below = _exactly(operator.mul)(
        _factorial(k), _factorial(_exactly(operator.sub)(n, k))
    )
    return _divide(_factorial(n), below)


def _floor(value: Number) -> Fraction:
    whole = math.floor(value) if isinstance(value, Fraction) else mpmath.floor(value)
    return Fraction(int(whole))


_OPERATIONS: dict[str, Callable[..., Number]] = {
    "+": _exactly(operator.add),
    "-": _exactly(operator.sub),
    "*": _exactly(operator.mul),
    "/": _divide,
    "^": _raise,
    "root": lambda value, index: _raise(value, _divide(Fraction(1), index)),
    "!": _factorial,
    "!!": _double_factorial,
    "binom": _choose,
    "abs": abs,
    "floor": _floor,
    "ceil": lambda value: -_floor(-value),
    "pi": lambda: +mpmath.pi,
    "e": lambda: +mpmath.e,
    "i": lambda: mpmath.mpc(0, 1),
}
