"""Checks of a run's existing files when it is resumed."""

import contextlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from scalerl_jax.formats.bounded import last_lines, read_lines
from scalerl_jax.formats.reading import is_remote, local_file, parse_json, read_value
from scalerl_jax.formats.remote import entries, open_path
from scalerl_jax.run.record import with_defaults

_MOST_DIFFERENCES_SHOWN = 5
_ABSENT = "absent"
_BEGINNING = b'{"step": '  # of a row; within a text its quotes would be escaped
_ROW = re.compile(_BEGINNING + rb"(0|[1-9][0-9]{0,17})[,}]")
_PLACED = "environment"  # FILE.py:FUNCTION, whose file may have moved
_MEND = "repair the file, or choose another --workdir"


@contextlib.contextmanager
def sound(file: Path, *, else_unknown: str, way_out: str) -> Iterator[None]:
    """Turn an error of reading a run's file into a ValueError that names the file."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{file} is broken ({error!r}), so {else_unknown} is unknown; {way_out}"
        ) from error


def find_settings(workdir: str) -> Path | None:
    """Return the path of a run's config.json, or of its local copy; None: no run.

    Raises:
        ValueError: the bucket cannot be used.
    """
    if not is_remote(workdir):
        file = Path(workdir).expanduser() / "config.json"
        return file if file.is_file() else None

    path = open_path(str(workdir), setting="--workdir=") / "config.json"
    return local_file(str(path)) if entries(path) else None


def check_record(
    config_file: Path,
    new: dict[str, Any],
    free_settings: Collection[str],
    *,
    begun: bool,
) -> dict[str, Any] | None:
    """Return the updated record; None: it is up to date.

    `new` is the record that a new run would have.  Settings that are not free may
    differ from it only if the run has not `begun` to write its files, except for the
    folder of the file that judges.  Settings that one of them lacks have their
    defaults.

    Raises:
        ValueError: the file is broken, or records other settings.
    """
    unknown = "whether this run may be resumed"
    with sound(config_file, else_unknown=unknown, way_out=_MEND):
        record = read_value(config_file)
        if not isinstance(record["config"], dict):
            raise TypeError("'config' is not a section")
    was, now = with_defaults(record["config"]), with_defaults(new["config"])
    changed = {
        name: [was.get(name, _ABSENT), now.get(name, _ABSENT)]
        for name in sorted(was.keys() | now.keys())
        if was.get(name, _ABSENT) != now.get(name, _ABSENT)
    }
    forbidden = {
        name: pair
        for name, pair in changed.items()
        if name not in free_settings
        and not (name == _PLACED and len(set(map(_unplaced, pair))) == 1)
    }
    if forbidden and not begun:
        return new
    if forbidden:
        shown = "; ".join(
            f"{name} was {old!r} and is now {new!r}"
            for name, (old, new) in list(forbidden.items())[:_MOST_DIFFERENCES_SHOWN]
        )
        more = len(forbidden) - _MOST_DIFFERENCES_SHOWN
        raise ValueError(
            f"{config_file.parent} is the run of other settings: {shown}"
            f"{f'; and {more} more' if more > 0 else ''}. Give the old values to "
            f"resume it, or another --workdir to start a new run"
        )
    code = {name: new[name] for name in ("versions", "git_revision")}
    latest = (record.get("resumes") or [record])[-1]
    if not changed and all(latest.get(name) == code[name] for name in code):
        return None
    resume = {"time": new["started"], "changed": changed, **code}
    resumes = [*record.get("resumes", []), resume]
    return {**record, "config": new["config"], "resumes": resumes}


def _unplaced(environment: object) -> str:
    """Return a value of `environment` without the folder of its file."""
    file, ending, functions = str(environment).rpartition(".py:")
    return Path(file).name + ending + functions if ending else functions


def check_report(file: Path, report: dict[str, dict[str, Any]]) -> None:
    """Check that the prompts are those recorded in the run's `data.json`.

    Raises:
        ValueError: the file is broken, or records other prompts.
    """
    unknown = "whether this run's prompts are still the same"
    with sound(file, else_unknown=unknown, way_out=_MEND):
        before = read_value(file)
        changed = [
            name
            for kind, sets in report.items()
            for name, now in sets.items()
            if now.get("sha256") != before[kind][name].get("sha256")
        ]
    if changed:
        named = ", ".join(map(repr, dict.fromkeys(changed)))
        raise ValueError(
            f"the prompts of {named} are not those that the run in {file.parent} began "
            f"with ({file.name}); give it the same files, "
            f"or choose another --workdir to start a new run"
        )


def last_row(path: Path) -> dict[str, Any]:
    """Return the last complete row of a JSON-lines file; {} if it has none.

    Raises:
        TypeError: the row is no JSON object.
        ValueError: the row is no JSON, or the file cannot be read.
    """
    if not path.exists():
        return {}
    for line in last_lines(path):
        row = parse_json(line)
        if not isinstance(row, dict):
            raise TypeError("its last line is no JSON object")
        return row
    return {}


def rows_until(step: int, path: Path) -> tuple[list[int], list[tuple[int, int]]]:
    """Find the rows up to optimizer step `step`; ignore an incomplete last line.

    Returns:
        The steps of the rows, and the contiguous pieces of the file with these rows:
        first byte and end of each.

    Raises:
        ValueError: a line is no row of a run.
    """
    steps: list[int] = []
    pieces: list[tuple[int, int]] = []
    end, broken = 0, None
    for number, line in enumerate(read_lines(path)):
        start, end = end, end + len(line)
        if not line.endswith(b"\n"):
            break  # a kill interrupted its write
        if broken is not None:  # a malformed line that is not the last one
            raise ValueError(
                f"line {number} of {path} is not a row of a run ({broken!r}); "
                f"remove it, or move the file away to lose its rows"
            ) from broken
        try:
            found = _step_of(line)
            goes = found > step
        except (ValueError, LookupError, TypeError) as error:
            broken = error
            continue
        if goes:
            continue
        steps.append(found)
        if pieces and pieces[-1][1] == start:
            start, _ = pieces.pop()
        pieces.append((start, end))
    return steps, pieces


def _step_of(line: bytes) -> int:
    """Return the step of a row.

    A line in the form that we write is not parsed, which would take 50 times as long:
    it begins with its step, ends with its object, and no other row begins in it.
    """
    begins = _ROW.match(line)
    if (
        begins
        and line.endswith(b"}\n")
        and line.count(_BEGINNING) == 1
        and line.isascii()
        and b"\0" not in line
    ):
        return int(begins[1])
    return parse_json(line)["step"]
