"""Details of a run from its directory: settings, versions, training curves, rollouts.

Every part may be missing; a part that exists and cannot be read is left out with a
note.  Files are read in pieces of bounded size, however large they are.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_jax.formats.bounded import check_regular, last_lines, open_regular
from scalerl_jax.formats.reading import parse_json, read_json
from scalerl_jax.run.directory import CONFIG_FILE, METRICS_FILE, ROLLOUTS_FILE
from scalerl_jax.run.record import flatten
from scalerl_jax.scaling.records import DEFAULT_X, Array
from scalerl_jax.scaling.tables import LEDGER_NAME, STEP_COLUMN, is_step
from scalerl_jax.scaling.text import Cells, Sheet, cut

MOST_BYTES = 4 * 2**20  # read of a settings file, a row, and each end of the rollouts
MOST_ROWS = 2_000  # of metrics.jsonl, at even distances
LARGEST = 1e30  # value that is drawn
MOST_SETTINGS = 100  # listed settings
MOST_OF_A_KIND = 2  # correct rollouts kept per step, and other ones
RIGHT = "correct"
# Columns of metrics.jsonl that are drawn, and their labels.
TRAINING_CURVES = {
    "reward/mean": "reward",
    "completion/mean_tokens": "length (tokens of a completion)",
    "entropy": "entropy (nats)",
    "staleness/mean": "staleness (optimizer steps)",
    "mismatch/mean_abs": "sampler against learner (nats)",
    "completion/cut_off_share": "share of completions cut off",
}
VERSIONS = ("scalerl_jax", "jax", "jaxlib", "python")  # shown in the report


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutRow:
    """One rollout of an evaluation."""

    step: int
    task: str
    prompt: str
    completion: str
    reference: str
    status: str  # the verdict: "correct", or another one
    tokens: int | None
    ended: str  # "cut off", "interrupted" or ""

    @property
    def is_right(self) -> bool:
        """Return whether the answer was judged correct."""
        return self.status == RIGHT


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunDetails:
    """The directory of a run, as far as it could be read."""

    settings: Mapping[str, Any]  # by dotted name, without the seed
    origin: Mapping[str, str]  # seed, versions, revision, chip, start
    training: Mapping[str, Array]  # [n] each: `TRAINING_CURVES`, `x`, and the step
    rollouts: tuple[RolloutRow, ...]  # of the first and of the last evaluation
    notes: tuple[str, ...]  # what was left out

    @property
    def says_anything(self) -> bool:
        """Return whether any file of a run was found."""
        parts = self.settings, self.origin, self.training, self.rollouts, self.notes
        return any(map(bool, parts))


def read_details(folder: Path, *, x_name: str) -> RunDetails:
    """Read the details of a run from its directory; empty for other directories.

    Args:
        x_name: the fit's x, over which the training curves are drawn too.
    """
    notes: list[str] = []
    record = _read_object(folder / CONFIG_FILE, notes)
    ledger = _read_object(folder / LEDGER_NAME, notes)
    config = record.get("config")
    settings = flatten(config) if isinstance(config, dict) else {}
    settings.pop("seed", None)
    columns = {name: name for name in (*TRAINING_CURVES, STEP_COLUMN)}
    columns["x"] = training_x(x_name)
    return RunDetails(
        settings=settings,
        origin=_origin(record, ledger),
        training=read_training(folder / METRICS_FILE, columns, notes),
        rollouts=read_rollouts(folder / ROLLOUTS_FILE, notes),
        notes=tuple(notes),
    )


def differing(details: Mapping[str, RunDetails]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ, with each run's value (None: unset)."""
    every = [each.settings for each in details.values() if each.settings]
    names = dict.fromkeys(name for settings in every for name in settings)
    found = {name: [settings.get(name) for settings in every] for name in names}
    return {
        name: values
        for name, values in found.items()
        if any(type(v) is not type(values[0]) or v != values[0] for v in values)
    }


def origins_sheet(details: Mapping[str, RunDetails]) -> Sheet:
    """Return a row for each run: its seed, versions and start."""
    columns = ("seed", "revision", *VERSIONS, "chip", "started")
    return ("run", *columns), [
        (name, *(cut(each.origin.get(column, "-"), 40) for column in columns))
        for name, each in details.items()
    ]


def settings_sheet(details: Mapping[str, RunDetails]) -> tuple[Sheet, int]:
    """Return a row for each setting in which runs differ, and the number left out.

    Runs with equal settings share a column.
    """
    known = {name: each for name, each in details.items() if each.settings}
    found = list(differing(known).items())
    listed = found[:MOST_SETTINGS]
    columns: dict[tuple[str, ...], list[str]] = {}
    for place, name in enumerate(known):
        column = tuple(_setting_text(values[place]) for _, values in listed)
        columns.setdefault(column, []).append(name)
    header = ("setting", *(", ".join(names) for names in columns.values()))
    rows: list[Cells] = [
        (cut(name, 80), *(column[place] for column in columns))
        for place, (name, _) in enumerate(listed)
    ]
    return (header, rows), len(found) - len(rows)


def _setting_text(value: Any) -> str:
    """Return a setting's value as a config writes it, or a dash if it is unset."""
    if value is None:
        return "-"
    return cut(value if isinstance(value, str) else json.dumps(value), 80)


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the JSON object in a file: {} if it is missing, with a note if invalid."""
    try:
        if not path.exists():
            return {}
        check_regular(path)
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path.name} is larger than {MOST_BYTES:,} bytes")
        return read_json(path)
    except (OSError, ValueError) as failure:
        notes.append(f"{path.name} is left out: {failure}")
        return {}


def _origin(record: dict[str, Any], ledger: dict[str, Any]) -> dict[str, str]:
    """Return a run's seed, revision, chip, start and versions, as text."""
    versions = record.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    named = {
        "seed": record.get("seed"),
        "revision": record.get("git_revision"),
        "chip": ledger.get("chip"),
        "started": record.get("started"),
        **{name: versions.get(name) for name in VERSIONS},
    }
    return {name: str(value) for name, value in named.items() if value is not None}


def read_training(
    path: Path, columns: Mapping[str, str], notes: list[str]
) -> dict[str, Array]:
    """Read columns of metrics.jsonl; of a long file, rows at even distances.

    Args:
        columns: the column of each name in the result; one without numbers is dropped.
        notes: gets a line on whatever could not be read.
    """
    found: dict[str, list[float]] = {name: [] for name in columns}
    unread, looked_at = 0, 0
    try:
        if not path.exists():
            return {}
        check_regular(path)
        for line in _spread_lines(path):
            looked_at += len(line)
            row = _parse(line)
            if row is None:
                unread += 1
                continue
            for name, column in columns.items():
                found[name].append(_number(row.get(column)))
    except (OSError, ValueError) as failure:
        notes.append(f"{path.name} is left out: {failure}")
        return {}
    if unread:
        notes.append(f"{path.name}: rows left out that are no JSON objects: {unread}")
    if looked_at < (size := path.stat().st_size):
        share = f"{100.0 * looked_at / size:.1g} %"
        notes.append(
            f"{path.name}: {len(found['x']):,} rows at even distances, {share} of it"
        )
    arrays = {name: np.array(values) for name, values in found.items()}
    return {name: each for name, each in arrays.items() if np.isfinite(each).any()}


def training_x(x_name: str) -> str:
    """Return the column of metrics.jsonl that holds the fit's x."""
    if is_step(x_name) or x_name == "policy_version":
        return STEP_COLUMN
    return f"compute/{'charged_chip_hours' if x_name == DEFAULT_X else x_name}"


def _spread_lines(path: Path) -> Iterator[bytes]:
    """Yield all lines of a file, or up to `MOST_ROWS` at even distances of a long one.

    The last one is always among them.
    The lines between them are not read, so a file of gigabytes costs no more.
    """
    size = path.stat().st_size
    stride, latest, end = size // MOST_ROWS, b"", 0
    with open_regular(path) as file:
        while line := file.readline(MOST_BYTES):
            yield line
            latest, end = line, file.tell()
            begin = end - len(line)
            if file.tell() < begin + stride:
                file.seek(begin + stride)
                file.readline(MOST_BYTES)  # skip the rest of a line that began before
    if end < size:
        last = next(iter(last_lines(path)), latest)
        if last.strip() != latest.strip():
            yield last


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, or None if the line is not one."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _number(value: object) -> float:
    """Return a number, or NaN if the value is not a number or too large to draw."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) < LARGEST else math.nan


def read_rollouts(path: Path, notes: list[str]) -> tuple[RolloutRow, ...]:
    """Return right and wrong rollouts of the first and of the last evaluation."""
    try:
        if not path.exists():
            return ()
        with open_regular(path) as file:
            first = file.read(MOST_BYTES).splitlines()
            size = path.stat().st_size
            if size > MOST_BYTES:
                first.pop()  # may be torn
            file.seek(max(size - MOST_BYTES, 0))
            last = file.read(MOST_BYTES).splitlines()[int(size > MOST_BYTES) :]
    except (OSError, ValueError) as failure:
        notes.append(f"{path.name} is left out: {failure}")
        return ()
    found: list[RolloutRow] = []
    unread = 0
    for lines in (first, last):
        rollouts = [_rollout(_parse(line) or {}) for line in lines]
        known = [rollout for rollout in rollouts if rollout is not None]
        unread = max(unread, len(rollouts) - len(known))
        if known:
            step = (known[0] if lines is first else known[-1]).step
            if lines is first or step != found[0].step:
                found += _some_of(each for each in known if each.step == step)
    if unread:
        notes.append(f"{path.name}: rows left out that are no rollouts: {unread}")
    return tuple(found)


def _some_of(rollouts: Iterable[RolloutRow]) -> list[RolloutRow]:
    """Return up to `MOST_OF_A_KIND` correct rollouts and as many others, in order."""
    kept: list[RolloutRow] = []
    for rollout in rollouts:
        alike = [each for each in kept if each.is_right == rollout.is_right]
        kept += [rollout] if len(alike) < MOST_OF_A_KIND else []
    return kept


def _rollout(row: Mapping[str, Any]) -> RolloutRow | None:
    """Return the rollout of a row, or None if the row is not a rollout."""
    step, tokens = row.get("step"), row.get("tokens")
    texts = [row.get(name) for name in ("prompt", "completion", "status")]
    if type(step) is not int or not all(isinstance(text, str) for text in texts):
        return None
    endings = {"cut_off": "cut off", "interrupted": "interrupted"}
    ended = [said for name, said in endings.items() if row.get(name) is True]
    return RolloutRow(
        step=step,
        task=str(row.get("task", "")),
        prompt=str(texts[0]),
        completion=str(texts[1]),
        reference=str(row.get("reference")),
        status=str(texts[2]),
        tokens=tokens if type(tokens) is int else None,
        ended=", ".join(ended),
    )
