"""Names of environments in packages: "env:PACKAGE", "env:PACKAGE@9(name=value)".

@9 takes the first 9 of the package's tasks; values in parentheses are settings of its
taskset.
"""

import re
from typing import Any, NamedTuple

from scalerl_jax.formats.arguments import read_arguments

_NAME = re.compile(
    r"env:(?P<package>[\w-]+(?:/[\w-]+)?)(?:@(?P<most>[1-9]\d{0,6}))?(?P<settings>\(.*\))?"
)
_MOST_CHARACTERS = 500  # of a name


class PackageName(NamedTuple):
    """A package, how many of its tasks are taken, and its taskset's settings."""

    package: str
    most: int | None  # None: all
    settings: dict[str, Any]


def read_name(name: str) -> PackageName:
    """Return the parts of a name "env:PACKAGE@9(setting=value, ...)".

    Raises:
        ValueError: it is not of this form.
    """
    found = _NAME.fullmatch(name) if len(name) <= _MOST_CHARACTERS else None
    if not found:
        raise ValueError(
            f"environment = {name[:_MOST_CHARACTERS]!r} must be env:PACKAGE, "
            f"env:PACKAGE@COUNT or env:PACKAGE(setting=value, ...), in "
            f"{_MOST_CHARACTERS} characters at most"
        )
    try:
        settings = read_arguments(found["settings"] or "()")
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"environment = {name!r}: {error}") from error
    most = int(found["most"]) if found["most"] else None
    return PackageName(found["package"], most, settings)
