"""State of a supervised run: `launch.json` in its directory, local or in a bucket.

The supervisor writes the file; commands that create machines for the run read it.  It
outlives the machines, so that a finished run is not started again.
"""

import dataclasses
import json
from pathlib import Path
from typing import Literal, get_args

from scalerl_jax.formats import remote
from scalerl_jax.formats.bounded import read_bytes
from scalerl_jax.formats.reading import is_remote, parse_json
from scalerl_jax.run.writing import replace_file

FILE = "launch.json"
State = Literal["running", "done", "preempted", "mistake", "failed"]
FINAL = ("done", "mistake", "failed")  # the run is not restarted automatically


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """State of a run's command, as its supervisor saw it last."""

    state: State
    command: tuple[str, ...]
    attempts: int = 0  # starts of the command
    preemptions: int = 0  # attempts that ended with status 75
    status: int | None = None  # exit status of the last attempt that ended
    said: str = ""  # last line of stderr that began with "error:"
    at: str = ""  # time of the last change, ISO 8601

    def to_json(self) -> bytes:
        """Return the content of the file."""
        return (json.dumps(dataclasses.asdict(self), indent=2) + "\n").encode()


def parse_outcome(text: bytes | str | None) -> Outcome | None:
    """Parse the text of an outcome file; None: it is missing or malformed."""
    if not text:
        return None
    try:
        values = parse_json(text)
        found = Outcome(**{**values, "command": tuple(values["command"])})
    except (ValueError, TypeError, KeyError):
        return None
    counts, texts = (found.attempts, found.preemptions), (found.said, found.at)
    well_formed = (
        found.state in get_args(State)
        and isinstance(values["command"], list)  # not a text, whose letters it would be
        and {*map(type, (*found.command, *texts))} == {str}
        and {*map(type, counts)} == {int}
        and type(found.status) in (int, type(None))
    )
    return found if well_formed else None


def read_outcome(workdir: str) -> Outcome | None:
    """Return the outcome of the run in a directory; None: no supervised run.

    Raises:
        ValueError: the bucket cannot be used.
        TimeoutError: the bucket does not answer in time.
    """
    if not is_remote(workdir):
        file = Path(workdir).expanduser() / FILE
        return parse_outcome(read_bytes(file) if file.is_file() else None)

    path = remote.open_path(workdir, setting="--workdir=", in_run=True)
    return parse_outcome(remote.read(path / FILE))


def write_outcome(workdir: str, outcome: Outcome) -> None:
    """Write the outcome into the run's directory.

    Raises:
        OSError: the directory cannot be written.
        ValueError: the bucket cannot be used.
    """
    if is_remote(workdir):
        path = remote.open_path(workdir, setting="--workdir=", in_run=True)
        remote.write(path / FILE, outcome.to_json())
        return
    directory = Path(workdir).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / FILE, outcome.to_json())
