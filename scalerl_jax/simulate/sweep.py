"""Many simulations of one run with other settings, and the best of them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Settings that a sweep may go over -> the field of a scenario.
SWEPT = {
    "batch.num_prompts": "num_prompts",
    "batch.group_size": "group_size",
    "generators.count": "replicas",
    "generators.devices": "replica_chips",
    "queue.max_staleness": "max_staleness",
    "queue.max_waiting": "max_waiting",
    "sampler.slots": "slots",
}
_MOST = 500  # simulations


def parse_sweep(text: str) -> dict[str, list[int]]:
    """Return the values of each setting: `generators.count=1,2,4 sampler.slots=64`.

    Raises:
        ValueError: it is not written so, or names another setting.
    """
    found: dict[str, list[int]] = {}
    for word in text.split():
        name, _, values = word.partition("=")
        if name not in SWEPT:
            raise ValueError(f"--sweep has {name!r}; choose from {sorted(SWEPT)}")
        if name in found:
            raise ValueError(f"--sweep has {name} twice")
        try:
            found[name] = [int(value) for value in values.split(",")]
        except ValueError:
            raise ValueError(
                f"--sweep={word} must be a setting and whole numbers, such as "
                f"generators.count=1,2,4"
            ) from None
    if not found:
        raise ValueError("--sweep is empty: --sweep='generators.count=1,2,4'")
    count = 1
    for values in found.values():
        count *= len(values)
    if count > _MOST:
        raise ValueError(f"--sweep has {count:,} combinations; {_MOST} at most")
    return found


@dataclasses.dataclass(frozen=True)
class Point:
    """One combination of a sweep."""

    settings: dict[str, int]
    figures: dict[str, float]  # empty if it cannot be
    reason: str = ""  # then


def sweep(
    values: dict[str, list[int]], simulate: Callable[[dict[str, int]], dict[str, float]]
) -> list[Point]:
    """Return every combination, the cheapest step first, those that cannot be last.

    `simulate` gets a scenario's fields, and returns figures or raises ValueError.
    """
    points = [_point(settings, simulate) for settings in _combinations(values)]
    return sorted(points, key=_cost)


def _cost(point: Point) -> float:
    return point.figures.get("chip_hours_per_step", float("inf"))


def _point(
    settings: dict[str, int], simulate: Callable[[dict[str, int]], dict[str, float]]
) -> Point:
    try:
        fields = {SWEPT[name]: value for name, value in settings.items()}
        return Point(settings, simulate(fields))
    except ValueError as error:
        return Point(settings, {}, str(error))


def _combinations(values: dict[str, list[int]]) -> Iterator[dict[str, int]]:
    for each in itertools.product(*values.values()):
        yield dict(zip(values, each, strict=True))


def table(points: Sequence[Point], columns: dict[str, str]) -> str:
    """Return a Markdown table of a sweep; `columns` are headings by figure."""
    names: list[Any] = list(points[0].settings)
    lines = ["| " + " | ".join([*names, *columns.values()]) + " |"]
    lines.append("|" + "---|" * (len(names) + len(columns)))
    for point in points:
        cells = [str(point.settings[name]) for name in names]
        if point.figures:
            cells += [f"{point.figures[name]:.4g}" for name in columns]
        else:
            cells += [point.reason, *[""] * (len(columns) - 1)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
