"""Cells as numbers: one way for every kind of file.

A cell is empty, a number of JSON, or text as people and spreadsheets write it:
"20,000,000", "0,53", "20.3%".  Whether "," or "." is the decimal mark is decided once
for a whole file (`decimal_mark`): the program that wrote it had one of them.
"""

import math
import re
from collections.abc import Iterable
from typing import Literal

from scalerl_jax.scaling.curves import CurveError

Mark = Literal[".", ","]
MARKS: tuple[Mark, ...] = (".", ",")
Cell = tuple[str, str, object]  # where it stands, its column, what it holds

EMPTY = frozenset(["", "nan", "na", "n/a", "#n/a", "null", "none", "-", "--"])
# Between thousands, besides the mark that is not the decimal one: spaces, apostrophe.
_SPACES = " \u00a0\u2009\u202f'"
_GROUPED = {
    mark: re.compile(
        rf"[+-]?\d{{1,3}}([{other}{_SPACES}])\d{{3}}(\1\d{{3}})*([{mark}]\d*)?"
    )
    for mark, other in ((".", ","), (",", "."))
}


def is_empty(cell: object) -> bool:
    """Whether a cell holds nothing, or NaN."""
    if isinstance(cell, str):
        return cell.strip().casefold() in EMPTY
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def is_percent(cell: object) -> bool:
    """Whether a cell is text with a percent sign."""
    return isinstance(cell, str) and cell.rstrip().endswith("%")


def to_number(cell: object, mark: Mark = ".") -> float:
    """A cell as a number; NaN for an empty one, hundredths for a percent sign.

    Raises:
        ValueError: the cell is no number with this decimal mark.
    """
    if is_empty(cell):
        return math.nan
    if isinstance(cell, int | float):
        try:
            return float(cell)
        except OverflowError as error:
            raise ValueError("it is too large for a number") from error
    if not isinstance(cell, str):
        raise ValueError(f"{type(cell).__name__} is no number")
    text = cell.strip().replace("\u2212", "-").removesuffix("%").rstrip()
    if _GROUPED[mark].fullmatch(text):
        text = re.sub(rf"[^\d+\-{mark}]", "", text)
    if mark == ",":
        if "." in text:
            raise ValueError("a decimal point among decimal commas")
        text = text.replace(",", ".")
    return float(text) / (100.0 if is_percent(cell) else 1.0)


def is_number(cell: object) -> bool:
    """Whether a cell is a number, with either decimal mark."""
    if is_empty(cell):
        return False
    for mark in MARKS:
        try:
            to_number(cell, mark)
        except ValueError:
            continue
        return True
    return False


def decimal_mark(
    path: object, cells: Iterable[Cell], *, semicolons: bool
) -> tuple[Mark, str | None]:
    """The decimal mark of a file, and a note where a reader should know of it.

    "0,53" can only have a decimal comma and "20,000,000" only a point; "1,500" may be
    either.  Where no cell decides, a comma is decimal in a file that ";" separates, as
    spreadsheets write it where the comma is decimal; elsewhere it groups thousands.

    Args:
        path: of the file, for messages.
        cells: that will be read as numbers; what is no text does not count.
        semicolons: the file is separated by ";".

    Raises:
        CurveError: some cells have decimal commas and others decimal points.
    """
    decided: dict[Mark, Cell] = {}
    open_comma: Cell | None = None
    for place, column, cell in cells:
        if not isinstance(cell, str) or not ("," in cell or "." in cell):
            continue
        found = _mark_of(cell)
        if found is not None:
            decided.setdefault(found, (place, column, cell))
        elif "," in cell and is_number(cell):
            open_comma = open_comma or (place, column, cell)
    if len(decided) == 2:
        (a, x, comma), (b, y, point) = decided[","], decided["."]
        raise CurveError(
            f"{a}: {x} = {comma!r} has a decimal comma, but {b}: {y} = {point!r} a "
            "decimal point; write all numbers of the file in one way"
        )
    if "," in decided:
        _, column, cell = decided[","]
        return ",", f"{path}: read with decimal commas, as {column} = {cell!r} has one"
    if "." in decided or open_comma is None:
        return ".", None
    mark: Mark = "," if semicolons else "."
    _, column, cell = open_comma
    number = f"{to_number(cell, mark):.12g}"
    return mark, f"{path}: {column} = {cell!r} is read as {number}"


def _mark_of(text: str) -> Mark | None:
    """The decimal mark that a number must have; None: no number, or either may be."""
    body = re.sub(r"[eE][+-]?\d+$", "", text.strip().removesuffix("%").strip())
    body = re.sub(rf"[{_SPACES}]", "", body).lstrip("+-\u2212")
    if not re.fullmatch(r"[\d.,]*\d[\d.,]*", body):
        return None
    used: list[Mark] = [mark for mark in MARKS if mark in body]
    if len(used) == 2:  # the last one, as the other groups the digits before it
        return max(used, key=body.rfind)
    (mark,) = used
    if body.count(mark) > 1:
        return "," if mark == "." else "."
    before, after = body.split(mark)
    if len(after) == 3 and 1 <= len(before) <= 3 and before[0] != "0":
        return None
    return mark
