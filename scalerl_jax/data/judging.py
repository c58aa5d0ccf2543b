"""Judging the completions of a file: `scalerl judge FILE`.

Rows have a `completion`, or the `turns` of an episode, and an `answer` or `tests` as
rows of prompts have them, or the arguments of the user's reward function, or the `task`
or `prompt` of a package's.  The verdicts are those of a run with the same settings.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from scalerl_jax.config import (
    PACKAGES,
    SETTINGS,
    EpisodeConfig,
    MathAnswer,
    RewardConfig,
)
from scalerl_jax.data.drafts import Draft, Malformed, first
from scalerl_jax.data.files import read_rows
from scalerl_jax.data.judged_rows import JudgedRow, RowToJudge
from scalerl_jax.data.own import PARTS
from scalerl_jax.data.own import read_own as read_question
from scalerl_jax.data.questions import extract_answer
from scalerl_jax.data.turns import PICTURES
from scalerl_jax.environments import packages, sandbox
from scalerl_jax.environments.judges import code
from scalerl_jax.environments.own_file import TOOLS, read_own
from scalerl_jax.environments.run_verifiers import check_own, make_pool
from scalerl_jax.environments.verdict import OwnReward, Verdict, figures_of_parts
from scalerl_jax.formats.bounded import read_lines
from scalerl_jax.formats.reading import parse_json
from scalerl_jax.process.ending import Parser, answer
from scalerl_jax.process.printing import to_stderr, to_stdout

_ASKING = PARTS["prompt"]  # columns
_JUDGED_BY = (
    *("reference", *PARTS["reference"], *PARTS["choices"]),
    *("messages", "conversations"),
)
_AHEAD = 64  # rows submitted and not judged, for each process


class _Judges(NamedTuple):
    """Judges of completions, and the reader of their rows."""

    reward: RewardConfig
    read: Callable[[str, dict[str, Any]], RowToJudge]  # (place, row)
    own: OwnReward | None = None
    answer_of: Callable[[str], str | None] = str  # what is judged of a completion


def make_parser() -> Parser:
    """Make the flags; those of the settings have their names and defaults."""
    parser = Parser(
        prog="python -m scalerl_jax.environments",
        description="Judge completions. Status 2: the input cannot be used; the "
        "message says why.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    judge = commands.add_parser(
        "judge", help="a verdict on each row of a file, and the shares"
    )
    judge.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="JSON lines, a JSON array or Parquet, also gzipped; rows with a "
        "'completion', and an 'answer' or 'tests'",
    )
    _add_own(judge)
    judge.add_argument(
        "--json",
        action="store_true",
        help="an object a line, with 'place', 'status' and 'detail'; the shares go to "
        "stderr",
    )
    judge.add_argument(
        "--answer-after",
        default="",
        metavar="TEXT",
        help="the answer follows the last of these, as data.answer_after, '</think>' "
        "perhaps (default: all of the completion is the answer)",
    )
    for field in dataclasses.fields(RewardConfig):
        if field.name in _SETTINGS:
            judge.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=type(field.default),
                default=field.default,
                choices=get_args(MathAnswer) if field.name == "math_answer" else None,
                metavar=None if field.name == "math_answer" else "VALUE",
                help=f"as reward.{field.name} (default: {field.default!r})",
            )
    return parser


def _add_own(judge: argparse.ArgumentParser) -> None:
    """Add the flags of the user's reward functions."""
    judge.add_argument(
        "--environment",
        default="",
        metavar="FILE.py:FUNCTION",
        help="reward functions of your own, as in a run; a row then has a "
        "'completion', perhaps a 'prompt' and a 'reference'; what they print goes to "
        "stderr. Or the name of an installed one, or a package, env:PACKAGE, whose "
        "tasks are named by a 'task' (0 for the first) or by their 'prompt'. For an "
        "environment of several turns a row has 'turns', the policy's texts; what the "
        "environment says after each is shown",
    )
    for name, values, meaning in (
        ("weights", "NUMBER,...", "reward.weights, of the functions of --environment"),
        ("variables", "NAME,...", "reward.variables, for --environment"),
        ("tools", "NAME,...", f"episode.tools, for --environment={TOOLS}"),
        ("documents", "DIRECTORY", "episode.documents, for the tool search"),
    ):
        judge.add_argument(
            f"--{name}", default="", metavar=values, help=f"as {meaning}"
        )


_SETTINGS = (
    "passed_at max_magnitude max_concurrent timeout_s num_workers memory_mib "
    "math_answer code_cpu_s code_memory_mib code_packages code_float_tolerance"
).split()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    flags = make_parser().parse_args(arguments)
    return answer(lambda: _run(flags))


def _run(flags: argparse.Namespace) -> None:
    settings = {name: getattr(flags, name) for name in _SETTINGS}
    for name, value in settings.items():
        given = f"--{name.replace('_', '-')}={value}"
        SETTINGS[f"reward.{name}"].check(value, given=given)
    judges = _judges(flags, RewardConfig(**settings))
    rows = _read(flags.file, judges)
    if any(row.reference.get("verifier") == "code" for row in rows):
        sandbox.check(judges.reward.code_packages)
    verdicts = []
    for judged in _judged(rows, judges):
        verdicts.append(judged.ending)
        line = json.dumps(judged.values()) if flags.json else judged.shown()
        to_stdout(f"{line}\n")
    (to_stderr if flags.json else to_stdout)(_summary(verdicts))


def _judges(flags: argparse.Namespace, reward: RewardConfig) -> _Judges:
    """Return what judges by these flags."""
    after, named = flags.answer_after, flags.environment
    answer_of = functools.partial(extract_answer, answer_after=after)
    if not named:
        for name in ("weights", "variables", "tools", "documents"):
            if value := getattr(flags, name):
                raise ValueError(f"--{name}={value} is not read without --environment")
        return _Judges(reward, _read_row, answer_of=answer_of)
    try:
        weights = tuple(map(float, filter(None, flags.weights.split(","))))
    except ValueError as error:
        raise ValueError(f"--weights={flags.weights} must be numbers") from error
    variables = tuple(filter(None, flags.variables.split(",")))
    reward = dataclasses.replace(reward, weights=weights, variables=variables)
    if (flags.tools or flags.documents) and named != TOOLS:
        raise ValueError(
            f"--tools and --documents are not read with --environment={named}; they "
            f"are of --environment={TOOLS}"
        )
    if named.startswith(PACKAGES):
        return _judges_of_package(named, reward, after)
    tools = tuple(filter(None, flags.tools.split(","))) or EpisodeConfig().tools
    episode = EpisodeConfig(tools=tools, documents=flags.documents)
    own = read_own(named, reward, episode=episode, answer_after=after, prints=True)
    if check_own(own, reward):
        return _Judges(reward, functools.partial(_read_own_row, by_turns=True), own)
    return _Judges(reward, _read_own_row, own, answer_of if after else str)


def _judges_of_package(name: str, reward: RewardConfig, after: str) -> _Judges:
    """Return the rewards of a package for `verifiers`, and the reader of its rows.

    Raises:
        ValueError: the package cannot be used.
    """
    if reward.weights:
        raise ValueError(f"--weights are not read with {name}, which has its own")
    with tempfile.TemporaryDirectory() as folder:
        file = packages.tasks_file(name, Path(folder), reward.variables)
        play = packages.play_of(file)
        tasks = [parse_json(line) for line in read_lines(file)]
    by_turns = play.by_turns
    own = packages.own_of(
        (name,), reward, end_of_thinking=after, by_turns=by_turns, prints=True
    )
    # The package gets the thinking too: it parts the completion itself.
    read = _PackageRows(name, tasks, by_turns=by_turns).read
    return _Judges(reward, read, own)


class _PackageRows:
    """Rows of a file with completions of a package's tasks."""

    def __init__(
        self, name: str, tasks: Sequence[dict[str, Any]], *, by_turns: bool
    ) -> None:
        """Look the tasks' last messages up by their texts."""
        self._name, self._tasks, self._by_turns = name, tasks, by_turns
        self._places: dict[str, list[int]] = {}
        for place, task in enumerate(tasks):
            said = task["messages"][-1]["content"]
            self._places.setdefault(str(said), []).append(place)

    def read(self, place: str, row: dict[str, Any]) -> RowToJudge:
        """Read the row at a place of the file.

        Raises:
            Malformed: it has no completion, or does not name one of the tasks.
        """
        task = self._tasks[self._place(row)]
        told = {"verifier": task["verifier"], "answer": task["reference"]}
        return RowToJudge(place, _turns(row, by_turns=self._by_turns), told)

    def _place(self, row: dict[str, Any]) -> int:
        number, count = row.get("task"), len(self._tasks)
        if number is not None:
            if type(number) is not int or not 0 <= number < count:
                raise Malformed(
                    f"field 'task' is {number!r}; {self._name} has the tasks 0 to "
                    f"{count - 1}"
                )
            return number
        found = self._places.get(str(row.get("prompt")), [])
        if len(found) != 1:
            raise Malformed(
                f"field 'prompt' is the last message of {len(found)} of the {count} "
                f"tasks of {self._name}; name one, or give its number as 'task'"
            )
        return found[0]


def _summary(verdicts: Sequence[Verdict]) -> str:
    """Return the shares of the verdicts, and the means of a reward and its parts."""
    counts = collections.Counter(verdict.status for verdict in verdicts)
    total = len(verdicts)
    shares = [f"{name} {n} ({n / total:.1%})" for name, n in counts.most_common()]
    rewards = [each.reward for each in verdicts if each.reward is not None]
    means = [f"; reward {sum(rewards) / len(rewards):g}"] if rewards else []
    parts = figures_of_parts([verdict.parts for verdict in verdicts])
    means += [f", {name} {value:g}" for name, value in parts.items()]
    return f"{total:,} rows: {', '.join(shares)}{''.join(means)}\n"


def _read(path: Path, judges: _Judges) -> list[RowToJudge]:
    """Read the rows of a file.

    Raises:
        ValueError: a row cannot be judged, or there are no rows.
    """
    rows = []
    for place, row, reason in read_rows(path):
        try:
            if row is None:
                raise Malformed(reason)
            rows.append(judges.read(place, row))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def _read_row(place: str, row: dict[str, Any]) -> RowToJudge:
    """Read a row that a verifier of the package judges."""
    return RowToJudge(place, _turns(row), _reference(row))


def _read_own_row(
    place: str, row: dict[str, Any], *, by_turns: bool = False
) -> RowToJudge:
    """Read a row that the user's functions or environment judge, as a run reads it."""
    draft = _draft(row, own=True)
    prompt = first(row, *_ASKING)
    shown = prompt if isinstance(prompt, str) or prompt is None else draft.text
    turns = _turns(row, by_turns=by_turns)
    return RowToJudge(place, turns, draft.reference, shown or "")


def _turns(row: dict[str, Any], *, by_turns: bool = False) -> tuple[str, ...]:
    """Return the policy's turns of a row, of which a completion is one."""
    given = row.get("completion")
    if not by_turns:
        if not isinstance(given, str):
            raise Malformed("field 'completion' is missing, or is no text")
        return (given,)
    turns = row.get("turns", [given])
    texts = isinstance(turns, list) and all(isinstance(each, str) for each in turns)
    if not (texts and turns) or ("turns" in row and given is not None):
        raise Malformed(
            "an environment of several turns needs the field 'turns', a list of the "
            "texts that the policy writes, or a 'completion' that is one"
        )
    return tuple(turns)


def _draft(row: dict[str, Any], *, own: bool = False) -> Draft:
    """Read a row as one of prompts, of which it may lack what asks.

    `own`: the row may lack what it is judged by, too.
    """
    # The completion is judged, so it is no reference; what was asked with stays aside.
    aside = ("completion", "turns", *PARTS["tools"], *PICTURES)
    told = {name: each for name, each in row.items() if name not in aside}
    if first(told, *_ASKING) is None:
        told["prompt"] = "any"
    if own and first(told, *_JUDGED_BY) is None:
        told["reference"] = None
    return read_question(told)


def _reference(row: dict[str, Any]) -> dict[str, Any]:
    reference = _draft(row).reference
    if reference["verifier"] == "code":
        code.read_tests(reference)
    return reference


def _judged(rows: Sequence[RowToJudge], judges: _Judges) -> Iterator[JudgedRow]:
    """Yield the rows with their verdicts, in their order."""
    found: dict[int, JudgedRow] = {}
    submitted = 0
    pool = make_pool(judges.reward, unnamed="math", own=judges.own)
    with contextlib.closing(pool):
        for number in range(len(rows)):
            while number not in found:
                while submitted < len(rows) and pool.pending < _AHEAD:
                    begun = JudgedRow(rows[submitted], pool.kind, submitted)
                    begun.submit(pool, judges.answer_of)
                    submitted += 1
                pool.wait(judges.reward.timeout_s)
                for judged, said in pool.poll():
                    if judged.take(*said):
                        found[judged.number] = judged
                    else:
                        judged.submit(pool, judges.answer_of)
            yield found.pop(number)
