"""The text of a function of a notebook or a script, for another process.

It has the function and the names around it that it uses (functions, modules, imported
names, constants), and nothing else: no cell or script is executed again.  No pickle.
"""

import ast
import dis
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Instructions that read names of a module; two of them in the bodies of classes.
_OUTSIDE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def text_of(function: Callable[..., Any]) -> str:
    """Return a module's text that defines the function.

    Raises:
        ValueError: it uses a value that text cannot recreate, or has no source text.
    """
    parts: dict[str, str] = {}
    _add(function, parts, set())
    return "\n\n".join(parts.values()) + "\n"


def _add(function: Any, parts: dict[str, str], seen: set[str]) -> None:
    name = getattr(function, "__name__", "")
    way_out = "or put it in a file, and name that: reward='my_task.py:score'"
    if not isinstance(function, types.FunctionType) or name == "<lambda>":
        raise ValueError(f"reward = {function!r} must be made by def; do so, {way_out}")
    if function.__closure__:
        raise ValueError(
            f"{name} uses {', '.join(function.__code__.co_freevars)} of the function "
            f"around it, which no text of its own has; define both at the top, "
            f"{way_out}"
        )
    seen.add(name)
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise ValueError(
            f"the text of {name} is not known ({error}); define it in a file or cell, "
            f"{way_out}"
        ) from error
    if source[0].isspace():  # of a block; without its indent its strings would change
        source = f"if True:\n{source}"
    # The names that pytest puts into functions with an assert are not in the text.
    used = {each for each in _globals_of(function.__code__) if each.isidentifier()}
    used |= {*_names_of_head(source)}
    for module in _submodules_of(source, function.__globals__):
        parts[module] = f"import {module}"
    for other in sorted((used & set(function.__globals__)) - seen):
        seen.add(other)
        value = function.__globals__[other]
        if (
            isinstance(value, types.FunctionType)
            and value.__module__ == function.__module__
            and value.__name__ == other
        ):
            _add(value, parts, seen)
        elif (line := _line(other, value)) is None:
            raise ValueError(
                f"{name} uses {other}, of type {type(value).__name__}, which no text "
                f"makes again; make it inside of {name}, {way_out}"
            )
        else:
            parts[other] = line
    parts[name] = source


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function's code looks up outside of it."""
    for each in dis.get_instructions(code):
        if each.opname in _OUTSIDE:
            yield each.argval
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _globals_of(each)


def _submodules_of(source: str, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield the modules below those among `names` that a text uses: xml.etree."""
    for node in ast.walk(ast.parse(source)):
        path = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        first, _, below = path.partition(".")
        if isinstance(package := names.get(first), types.ModuleType):
            module = f"{package.__name__}.{below}"
            if module in sys.modules:
                yield module


def _names_of_head(source: str) -> Iterator[str]:
    """Yield the names in a function's decorators, defaults and annotations."""
    (function,) = ast.parse(source).body
    if isinstance(function, ast.If):  # around the text of an indented one
        (function,) = function.body
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef), source
    for part in (*function.decorator_list, function.args, function.returns):
        for node in ast.walk(part) if part else ():
            if isinstance(node, ast.Name):
                yield node.id


def _line(name: str, value: Any) -> str | None:
    """Return the line that defines a name again; None if there is none."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    home = str(getattr(value, "__module__", "__main__"))
    own = str(getattr(value, "__name__", ""))
    if (
        own
        and home != "__main__"
        and getattr(sys.modules.get(home), own, None) is value
    ):
        return f"from {home} import {own} as {name}"
    try:
        same = ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return None
    return f"{name} = {value!r}" if same else None
