"""Parse the arguments of a user's name: "gym:NAME(setting=value, other='text')".

Values are literals; nothing is evaluated.
"""

import ast
from typing import Any

_MOST = 10**9  # the largest number in a value


def read_arguments(arguments: str) -> dict[str, Any]:
    """Parse "(a=1, b='c')" into values by name.

    Raises:
        ValueError: the text has another form, a setting is given twice, or a value is
            no literal or beyond 10^9.
        SyntaxError: the text is not Python.
    """
    call = ast.parse(f"settings{arguments}", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{arguments} is not (setting=value, ...)")
    if call.args or any(each.arg is None for each in call.keywords):
        raise ValueError(f"{arguments} gives a value without its setting's name")
    values: dict[str, Any] = {}
    for each in call.keywords:
        assert each.arg is not None
        if each.arg in values:
            raise ValueError(f"{arguments} gives {each.arg} twice")
        try:
            values[each.arg] = ast.literal_eval(each.value)
        except (ValueError, TypeError) as error:  # a list for a key of a dictionary
            raise ValueError(
                f"{each.arg} = {ast.unparse(each.value)} is no number, text, list, "
                f"True, False or None"
            ) from error
        _check_bounds(each.arg, values[each.arg])
    return values


def _check_bounds(name: str, value: Any) -> None:
    """Raise ValueError for a value out of range, or of a type that no setting has."""
    if isinstance(value, list | tuple | set):
        for each in value:
            _check_bounds(name, each)
    elif isinstance(value, dict):
        _check_bounds(name, [*value.keys(), *value.values()])
    elif isinstance(value, complex | bytes):
        raise ValueError(f"{name} = {value!r} is of no kind that a setting has")
    elif isinstance(value, int | float) and not abs(value) <= _MOST:
        raise ValueError(f"{name} = {value!r} must be within {_MOST:,} of 0")
