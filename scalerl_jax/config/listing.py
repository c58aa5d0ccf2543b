"""Every setting as `--help` lists it: default, choices, unit and source.

Unit and source are the comments of the settings' dataclasses, and written nowhere else.
"""

import ast
import dataclasses
import inspect
import io
import sys
import textwrap
import tokenize
import typing
from typing import Any

_INDENT = " " * 6


def list_settings(config: type) -> str:
    """The settings of a dataclass and of its sections, a paragraph each."""
    hints = typing.get_type_hints(config)
    sections: dict[str, Any] = {"": config} | {
        f"{name}.": hint
        for name, hint in hints.items()
        if dataclasses.is_dataclass(hint)
    }
    return "\n\n".join(
        "\n".join([(section.__doc__ or "").splitlines()[0], *_entries(section, prefix)])
        for prefix, section in sections.items()
    )


def comments(section: type) -> dict[str, str]:
    """The comments above and beside each field of a dataclass, by its name."""
    source = inspect.getsource(sys.modules[section.__module__])
    lines = source.splitlines()
    said = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == section.__name__:
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    first = field.lineno
                    while lines[first - 2].lstrip().startswith("#"):
                        first -= 1
                    rows = range(first, (field.end_lineno or first) + 1)
                    text = " ".join(said[row] for row in rows if row in said)
                    found[ast.unparse(field.target)] = text
    return found


def _entries(section: type, prefix: str) -> list[str]:
    hints, said = typing.get_type_hints(section), comments(section)
    return [
        _entry(f"{prefix}{field.name}", field.default, hints[field.name], said)
        for field in dataclasses.fields(section)
        if not dataclasses.is_dataclass(hints[field.name])
    ]


def _entry(name: str, default: Any, hint: Any, said: dict[str, str]) -> str:
    text = said[name.rpartition(".")[2]]
    if typing.get_origin(hint) is typing.Literal:
        text = f"one of {', '.join(map(str, typing.get_args(hint)))}; {text}"
    wrapped = textwrap.fill(text, 88, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return f"  --config.{name}={default!r}\n{wrapped}"
