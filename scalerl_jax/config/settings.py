"""Declaration of a setting: a dataclass field with type, range, default and text.

    max_prompt_tokens: Tokens = setting(2048, "longest prompt", "ScaleRL")

The annotation has the type and, for a number, its `ValueRange` and unit; `setting` has
the default, what the setting is and where the default is from.  Checks of single
settings, `--help` and docs/settings.md are derived from these.
"""

import contextlib
import dataclasses
import math
import operator
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")
_ENDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "above": ("above {:,}", operator.gt),
    "at_least": ("{:,} or more", operator.ge),
    "below": ("below {:,}", operator.lt),
    "at_most": ("{:,} at most", operator.le),
}


@dataclasses.dataclass(frozen=True)
class ValueRange:
    """The unit and the range of a number; an end that is None is open.

    Upper ends of counts are above what any run needs: a larger value is a typing error,
    which would otherwise fail only after hours.
    """

    unit: str = ""
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def ends(self) -> Iterator[tuple[str, Callable[[float], bool]]]:
        """Yield each end in words, and whether a value is on its right side."""
        for name, (words, inside) in _ENDS.items():
            if (end := getattr(self, name)) is not None:
                yield words.format(end), lambda value, f=inside, end=end: f(value, end)


class With:
    """The condition for a setting to be read: the values another setting must have."""

    def __init__(self, setting: str, *values: Any, words: str = "above 0") -> None:
        """Store the values, one of which it must have; none: any value that is not off.

        Off is 0 or an empty text; `words` describe any other value.
        """
        self.setting, self.values, self._words = setting, values, words

    def __str__(self) -> str:
        """Return the condition in words."""
        if not self.values:
            return f"{self.setting} {self._words}"
        return f"{self.setting} = {' or '.join(map(repr, self.values))}"

    def holds(self, actual: Any) -> bool:
        """Return whether the other setting's value `actual` meets the condition."""
        return actual in self.values if self.values else bool(actual)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The full declaration of a setting."""

    name: str = ""  # dotted, with its section
    kind: Any = None  # the type; a Literal for a choice
    default: Any = None
    limits: ValueRange = ValueRange()
    text: str = ""
    source: str = ""  # paper or code that the default, or another value, is from
    needs: With | None = None

    def check(self, value: Any, *, given: str = "") -> None:
        """Refuse a number outside of the limits; `given` is what the user wrote.

        Raises:
            ValueError: names the setting, its value and the limit.
        """
        for words, inside in self.limits.ends():
            if not inside(value):
                raise ValueError(f"{given or f'{self.name} = {value}'} must be {words}")


def setting(
    default: T,
    text: str = "",
    source: str = "",
    *,
    choices: Iterable[str] = (),
    needs: With | None = None,
) -> T:
    """Return a field: its default, what it is, and where the default is from.

    `choices` are the values of a text whose annotation is no Literal.  With `needs` the
    setting must keep its default unless the condition holds, since nothing reads it.
    """
    kind = Literal[tuple(choices)] if choices else None
    said = Setting(kind=kind, text=text, source=source, needs=needs)
    return dataclasses.field(default=default, metadata={"said": said})


def settings_of(
    cls: type, *, prefix: str = "", needs: With | None = None
) -> dict[str, Setting]:
    """Return the settings of a dataclass and of its sections, by dotted name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found: dict[str, Setting] = {}
    for field in dataclasses.fields(cls):
        name, kind, limits = prefix + field.name, hints[field.name], ValueRange()
        if typing.get_origin(kind) is Annotated:
            kind, limits = typing.get_args(kind)
        said: Setting = field.metadata.get("said", Setting())
        needed = said.needs or needs
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found |= settings_of(kind, prefix=f"{name}.", needs=needed)
        else:
            found[name] = dataclasses.replace(
                said,
                name=name,
                kind=said.kind or kind,
                default=field.default,
                limits=limits,
                needs=needed,
            )
    return found


def build(cls: type, values: dict[str, Any], *, prefix: str = "") -> Any:
    """Return a dataclass of settings from nested values, with names and types checked.

    Raises:
        ValueError: names the setting, its value and what it must be.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            raise ValueError(
                f"{prefix}{name} is not a setting; choose from "
                f"{[prefix + known for known in fields]}"
            )
    hints, known = typing.get_type_hints(cls), settings_of(cls)
    made = {}
    for name, value in values.items():
        if name in known:
            made[name] = _typed(known[name].kind, value, setting=f"{prefix}{name}")
        elif isinstance(value, dict):
            made[name] = build(hints[name], value, prefix=f"{prefix}{name}.")
        else:
            raise ValueError(f"{prefix}{name} = {value!r} must be a section")
    return cls(**made)


def _typed(kind: Any, value: Any, *, setting: str) -> Any:
    """Return the value as the setting's type, or refuse it."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        if isinstance(value, bool) and set(inner) == {"auto", "off", "on"}:
            return "on" if value else "off"  # a run's file from before "auto"
        if value not in inner:
            raise ValueError(f"{setting} = {value!r}; choose from {sorted(inner)}")
        return value
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{setting} = {value!r} must be a tuple")
        return tuple(_typed(inner[0], part, setting=f"{setting}[]") for part in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is float and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{setting} = {value} must be a finite number")
    if type(value) is not kind:
        raise ValueError(
            f"{setting} = {value!r} is of type {type(value).__name__}; "
            f"it must be of type {kind.__name__}"
        )
    return value


@contextlib.contextmanager
def naming(setting: str) -> Iterator[None]:
    """Prefix the message of an error about a file with the setting's name.

    It is a ValueError, or a TimeoutError of the file's bucket.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error
    except TimeoutError as error:
        raise TimeoutError(f"{setting}: {error}") from error
