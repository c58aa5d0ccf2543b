"""Environments in packages for `verifiers`, which are called "env:PACKAGE".

A package is imported only in processes of its own.  One of these,

    python -m scalerl_jax.environments.packages NAME FILE

writes the tasks as rows of prompts, without their answers.  The verifier processes
score: for them the package becomes a file with a reward function or an environment,
like a user's own (`own_file`).
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scalerl_jax.config import PACKAGES, EpisodeConfig, RewardConfig
from scalerl_jax.environments.own_file import check_variables
from scalerl_jax.environments.package_names import read_name
from scalerl_jax.environments.verdict import MAX_START_S, OwnReward
from scalerl_jax.formats.bounded import read_lines, read_text
from scalerl_jax.formats.reading import parse_json
from scalerl_jax.process.child_environment import child_environment, own_python

_REFUSED = 3  # exit status of a process that wrote the reason instead of rows
_MOST_REASON = 2**12  # characters
_SOURCE = '''"""Tasks of packages, scored by verifiers {version}: {packages}."""

from scalerl_jax.environments.played import Tasksets

{function} = Tasksets({names!r}, end_of_thinking={end_of_thinking!r}).{function}
'''


@functools.cache
def tasks_file(name: str, directory: Path, variables: tuple[str, ...]) -> Path:
    """Return a file of the prompts of a package's tasks, JSON lines, newly written.

    Args:
        name: "env:PACKAGE", as in a run's setting.
        directory: The directory in which the file is made.
        variables: The only environment variables that the package gets.

    Raises:
        ValueError: the package cannot be used, with the reason.
    """
    read_name(name)
    check_variables(variables)
    folder = directory.expanduser() / "tasksets"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.jsonl"
    with tempfile.TemporaryDirectory(dir=folder) as made:
        rows = Path(made) / "rows"
        if why_not := _write(name, rows, variables):
            raise ValueError(f"environment = {name!r} cannot be used: {why_not}")
        os.replace(rows, file)
    return file


def _write(name: str, rows: Path, variables: Sequence[str]) -> str:
    """Start a process that writes the rows; return why it failed, or ""."""
    process = subprocess.Popen(
        [*own_python(), "-m", "scalerl_jax.environments.packages", name, str(rows)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # no output of a package in a run's
        stderr=subprocess.DEVNULL,
        env=child_environment(**{each: os.environ[each] for each in variables}),
        start_new_session=True,
    )
    try:
        status = process.wait(timeout=MAX_START_S)
    except subprocess.TimeoutExpired:
        return f"it took more than {MAX_START_S:g} s to load its tasks"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status == _REFUSED:
        return read_text(rows, most=4 * _MOST_REASON)
    return f"its process ended with exit code {status}" if status else ""


class Play(NamedTuple):
    """The way in which the policy plays the tasks of a package."""

    by_turns: bool = False  # it may take several
    with_tools: bool = False


def play_of(rows: Path) -> Play:
    """Return the way in which the tasks of a file of prompts are played."""
    first = parse_json(next(read_lines(rows)))
    return Play("said" in first["reference"], bool(first["tools"]))


def own_of(
    names: Sequence[str],
    reward: RewardConfig,
    *,
    end_of_thinking: str,
    episode: EpisodeConfig | None = None,
    by_turns: bool = False,
    prints: bool = False,
) -> OwnReward:
    """Return the reward function or the environment for the tasks of these packages.

    Its text has the packages' versions, so that a resumed run reports other ones.
    `prints` is that of `OwnReward`.

    Raises:
        ValueError: a variable is missing.
    """
    assert all(name.startswith(PACKAGES) for name in names), names
    check_variables(reward.variables)
    packages = dict.fromkeys(read_name(name).package for name in names)
    function = "make" if by_turns else "score"
    text = _SOURCE.format(
        version=_version("verifiers"),
        packages=", ".join(f"{each} {_version(each)}".strip() for each in packages),
        names=tuple(names),
        function=function,
        end_of_thinking=end_of_thinking,
    )
    return OwnReward(
        file=names[0],
        text=text,
        functions=(function,),
        weights=(1.0,),
        max_magnitude=reward.max_magnitude,
        max_concurrent=reward.max_concurrent,
        variables=reward.variables,
        prints=prints,
        max_observation_tokens=(episode or EpisodeConfig()).max_observation_tokens,
        by_turns=by_turns,
    )


def _version(package: str) -> str:
    """Return the version of an installed package; "" where none is known."""
    try:
        return importlib.metadata.version(package.rpartition("/")[2])
    except importlib.metadata.PackageNotFoundError:
        return ""


def main(name: str, file: Path) -> int:
    """Write the rows of a package, or why there are none; return the exit status."""
    try:
        from scalerl_jax.environments import played  # it brings verifiers

        rows = "".join(f"{json.dumps(row)}\n" for row in played.rows_of(name))
    except BaseException as error:  # noqa: BLE001  whatever a package does
        said = str(error).strip().splitlines()[:1]
        told = isinstance(error, ValueError | ImportError)
        kind = [] if told else [type(error).__name__]
        file.write_text(": ".join([*kind, *said])[:_MOST_REASON])
        return _REFUSED
    file.write_text(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
