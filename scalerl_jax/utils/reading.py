"""JSON from outside: whatever is wrong with it is a ValueError with a short reason."""

import json
from typing import Any, Protocol

MAX_DEPTH = 100  # objects and lists inside of each other


class _File(Protocol):
    def exists(self) -> bool: ...
    def is_file(self) -> bool: ...
    def read_bytes(self) -> bytes: ...
    def read_text(self, encoding: str) -> str: ...


class Directory(Protocol):
    """A `Path` to its readers; `utils.gguf` makes the files on demand."""

    def __truediv__(self, name: str, /) -> _File:
        """A file in it, which may be missing."""
        ...


def check_regular(path: _File) -> None:
    """Refuse what may never end when it is read: devices, pipes, directories.

    Raises:
        ValueError: with what to name instead.
    """
    if not path.exists():
        raise ValueError(f"{path}: there is no such file")
    if not path.is_file():
        raise ValueError(f"{path} is no regular file; write its content into one")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no UTF-8 or no JSON, nests too deep, or has a number that is
            too long.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError(f"it nests deeper than {MAX_DEPTH}") from error
    except ValueError as error:  # Python's limit
        raise ValueError("a number in it has thousands of digits") from error
    # What counts few brackets cannot be deep: most texts are not looked through.
    brackets = text.count("[") + text.count("{")
    if brackets > MAX_DEPTH and isinstance(value, dict | list) and _is_deep(value):
        raise ValueError(f"it nests deeper than {MAX_DEPTH}")
    return value


def read_json(path: _File) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: names the file, which is missing or holds something else.
    """
    check_regular(path)
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def _is_deep(value: dict[str, Any] | list[Any]) -> bool:
    """Return whether containers nest deeper than the limit, level by level."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [
            child
            for children in inner
            for child in children
            if isinstance(child, dict | list)
        ]
    return bool(level)
