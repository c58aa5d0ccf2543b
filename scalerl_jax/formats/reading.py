"""Locate files by the names that users give, and parse JSON in them.

Every problem with a file is a ValueError with a short reason.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from scalerl_jax.formats.bounded import MOST_JSON, File, read_bytes
from scalerl_jax.formats.remote import URL, fetch_copy

MAX_DEPTH = 100  # of nested objects and lists
_MOST_SHOWN = 200  # characters of a value in an error
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def is_remote(path: object) -> bool:
    """Return True if a path is a URL, such as one in a bucket."""
    return "://" in str(path)


def require_local(path: str | Path, *, flag: str = "") -> None:
    """Refuse a path in a bucket where a directory of this machine is written.

    `flag` stands before the path in the error ("--out=").

    Raises:
        ValueError: the path is a URL, or a `Path` made of one.
    """
    if URL.match(str(path)):
        typed = URL.sub(r"\1://", str(path), count=1)
        raise ValueError(
            f"{flag}{typed} is in a bucket; name a directory of this machine, and copy "
            f"it there"
        )


def local_file(name: str, *, suffixes: tuple[str, ...] | None = None) -> Path:
    """Return a local path; a path in a bucket is fetched, and its local copy returned.

    From a directory in a bucket, files that end with one of `suffixes` are fetched.

    Raises:
        ValueError: the bucket does not have it, or cannot be used.
        TimeoutError: the bucket does not answer in time.
    """
    if not is_remote(name):
        return Path(name).expanduser()
    return fetch_copy(name, suffixes=suffixes)


def is_hub_id(name: str | Path) -> bool:
    """Return True if a name is "OWNER/NAME[@REVISION]" and no local file."""
    return bool(_ID.fullmatch(str(name))) and not Path(name).exists()


class Directory(Protocol):
    """The part of `Path` that readers use; `formats.gguf` makes files on demand."""

    def __truediv__(self, name: str, /) -> File:
        """Return a file in the directory, which may be missing."""
        ...


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
    if is_deep(value, text):
        raise ValueError(f"it nests deeper than {MAX_DEPTH}")
    return value


def is_deep(value: Any, text: str) -> bool:
    """Return True if a value, which is written as `text`, nests deeper than the limit.

    A text with few brackets cannot be deep, so most values need no further check.
    """
    brackets = text.count("[") + text.count("{")
    return brackets > MAX_DEPTH and isinstance(value, dict | list) and _is_deep(value)


def read_json(path: File, *, most: int = MOST_JSON) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ValueError: the file is missing, or holds something else.
    """
    return object_of(read_bytes(path, most=most), path)


def object_of(content: bytes, path: object) -> dict[str, Any]:
    """Return the JSON object that is the content of the file or object `path`.

    Raises:
        ValueError: it is something else.
    """
    value = _value_of(content, path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def read_value(path: File, *, most: int = MOST_JSON) -> Any:
    """Return the JSON value in a file.

    Raises:
        ValueError: the file is missing, or holds something else.
    """
    return _value_of(read_bytes(path, most=most), path)


def _value_of(content: bytes, path: object) -> Any:
    try:
        return parse_json(content)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


@dataclasses.dataclass(frozen=True)
class Fields:
    """Fields of a JSON object; errors name its file, the field and the value."""

    file: object  # its name in errors
    values: dict[str, Any]
    prefix: str = ""

    def refuse(self, name: str, supported: str) -> ValueError:
        """Return the error for a field; `supported` describes valid values."""
        value = self.values.get(name)
        said = f"{value!r}"[:_MOST_SHOWN]
        shown = "is missing" if value is None else f"= {said} is not supported"
        return ValueError(f"{self.file}: {self.prefix}{name} {shown}; {supported}")

    def integer(
        self, name: str, default: int | None = None, *, most: int = 2**28
    ) -> int:
        """Return a field's integer, from 1 to `most`, or the default if absent."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= most:
            raise self.refuse(name, f"it must be an integer from 1 to {most}")
        return value

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """Return the fields, with defaults for the absent ones, and without nulls."""
        values = dict(defaults) | self.values
        given = {name: each for name, each in values.items() if each is not None}
        return dataclasses.replace(self, values=given)

    def number(self, name: str, *, zero: bool = False) -> float:
        """Return a finite number above 0; with `zero` it may be 0."""
        value: Any = self.values.get(name)
        if not _is_finite(value) or not (value or zero):
            least = "of at least 0" if zero else "above 0"
            raise self.refuse(name, f"it must be a number {least}")
        return float(value)

    def pairs(self, name: str, what: str) -> tuple[tuple[float, float], ...]:
        """Return a list of pairs of numbers of 0 or more; errors call a pair `what`."""
        rows: Any = self.values.get(name)
        if not isinstance(rows, list) or not all(
            isinstance(row, list) and len(row) == 2 and all(map(_is_finite, row))
            for row in rows
        ):
            raise self.refuse(
                name, f"it must be a list of pairs {what} of at least 0 each"
            )
        return tuple((float(a), float(b)) for a, b in rows)

    def known(self, names: Sequence[str], *, what: str) -> None:
        """Raise ValueError for a field not in `names`; errors call a field `what`."""
        for name in self.values:
            if name not in names:
                raise ValueError(
                    f"{self.file}: {name[:_MOST_SHOWN]!r} is no {what}; choose from "
                    f"{list(names)}"
                )

    def only(self, name: str, allowed: Sequence[Any]) -> None:
        """Raise ValueError for a value that is given and not allowed."""
        if self.values.get(name) is not None and self.values[name] not in allowed:
            raise self.refuse(name, f"only {list(allowed)} is")


def _is_finite(value: Any) -> bool:
    """Return True if a value is a number of at least 0 that a float can hold."""
    return type(value) in (int, float) and 0 <= value < sys.float_info.max


def _is_deep(value: dict[str, Any] | list[Any]) -> bool:
    """Return True if containers nest deeper than the limit; goes level by level."""
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
