"""Arithmetic of numbers in a text, for the tool `calculator`; nothing is executed."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

_MOST_EXPRESSION, _MOST_DIGITS = 400, 200

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers, + - * / // % ** and brackets.

    Raises:
        ValueError: it is something else, or too large.
    """
    if len(expression) > _MOST_EXPRESSION:
        raise ValueError(f"more than {_MOST_EXPRESSION} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, OverflowError, MemoryError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}") from None
    if not math.isfinite(value):
        raise ValueError("no finite number")
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if type(number) is not bool:
            found = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            found = _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            first, second = _value(left), _value(right)
            if isinstance(op, ast.Pow):
                _check_power(first, second)
            found = _BINARY[type(op)](first, second)
        case _:
            raise ValueError("only numbers, + - * / // % ** and brackets")
    if isinstance(found, complex):  # a root of a negative number
        raise ValueError("no finite number")
    if isinstance(found, int) and found.bit_length() > 4 * _MOST_DIGITS:
        raise ValueError(f"more than {_MOST_DIGITS} digits")
    return found


def _check_power(base: Any, exponent: Any) -> None:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(exponent) * base.bit_length() > 4 * _MOST_DIGITS:
        raise ValueError(f"more than {_MOST_DIGITS} digits")
