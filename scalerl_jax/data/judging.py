"""Judging the completions of a file: `scalerl judge FILE`.

Rows have a `completion`, and an `answer` or `tests` as rows of prompts have them, or
the arguments of the user's reward function, or the `task` or `prompt` of a package's.
The verdicts are those of a run with the same settings.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from scalerl_jax.config import PACKAGES, SETTINGS, MathAnswer, RewardConfig
from scalerl_jax.data.drafts import Draft, Malformed, first
from scalerl_jax.data.files import read_rows
from scalerl_jax.data.own import PARTS
from scalerl_jax.data.own import read_own as read_question
from scalerl_jax.data.questions import extract_answer
from scalerl_jax.data.turns import PICTURES
from scalerl_jax.environments import packages, sandbox
from scalerl_jax.environments.judges import code
from scalerl_jax.environments.own_file import read_own
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


class _Row(NamedTuple):
    """A completion, its location in the file, and its reference."""

    place: str
    completion: str
    reference: dict[str, Any]
    prompt: str = ""


class _Judges(NamedTuple):
    """Judges of completions, and the reader of their rows."""

    reward: RewardConfig
    read: Callable[[str, dict[str, Any]], _Row]  # (place, row)
    own: OwnReward | None = None
    answer_after: str = ""  # what is judged of a completion follows it
    whole: bool = False  # without `answer_after`, all of the completion is judged


class _Judged(NamedTuple):
    """The verdict on a row."""

    place: str
    verdict: Verdict

    def shown(self) -> str:
        """Return the verdict as a line of text."""
        status, detail, reward, parts = self.verdict
        rewards = {**({} if reward is None else {"reward": reward}), **parts}
        numbers = [f"{name} {_number(each)}" for name, each in rewards.items()]
        return "  ".join(filter(None, (self.place, status, *numbers, detail)))

    def values(self) -> dict[str, Any]:
        """Return the verdict as JSON values, with reward and parts if there are any."""
        row: dict[str, Any] = {
            "place": self.place,
            "status": self.verdict.status,
            "detail": self.verdict.detail,
        }
        if self.verdict.reward is not None or self.verdict.parts:
            row |= {"reward": self.verdict.reward, "parts": dict(self.verdict.parts)}
        return row


def _number(value: float | None) -> str:
    return "unjudged" if value is None else f"{value:g}"


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
        "tasks are named by a 'task' (0 for the first) or by their 'prompt'",
    )
    judge.add_argument(
        "--weights",
        default="",
        metavar="NUMBER,...",
        help="as reward.weights, of the functions of --environment",
    )
    judge.add_argument(
        "--variables",
        default="",
        metavar="NAME,...",
        help="as reward.variables, for --environment",
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
        verdicts.append(judged.verdict)
        line = json.dumps(judged.values()) if flags.json else judged.shown()
        to_stdout(f"{line}\n")
    (to_stderr if flags.json else to_stdout)(_summary(verdicts))


def _judges(flags: argparse.Namespace, reward: RewardConfig) -> _Judges:
    """Return what judges by these flags."""
    after, named = flags.answer_after, flags.environment
    if not named:
        for name in ("weights", "variables"):
            if value := getattr(flags, name):
                raise ValueError(f"--{name}={value} is not read without --environment")
        return _Judges(reward, _read_row, answer_after=after)
    try:
        weights = tuple(map(float, filter(None, flags.weights.split(","))))
    except ValueError as error:
        raise ValueError(f"--weights={flags.weights} must be numbers") from error
    variables = tuple(filter(None, flags.variables.split(",")))
    reward = dataclasses.replace(reward, weights=weights, variables=variables)
    if named.startswith(PACKAGES):
        return _judges_of_package(named, reward, after)
    own = read_own(named, reward, prints=True)
    if check_own(own, reward):
        raise ValueError(
            f"--environment={named} makes an environment of several turns; a "
            f"completion of a file is one, which a reward function judges"
        )
    return _Judges(reward, _read_own_row, own, after, whole=True)


def _judges_of_package(name: str, reward: RewardConfig, after: str) -> _Judges:
    """Return the rewards of a package for `verifiers`, and the reader of its rows.

    Raises:
        ValueError: the package cannot be used, or its tasks take several turns.
    """
    if reward.weights:
        raise ValueError(f"--weights are not read with {name}, which has its own")
    with tempfile.TemporaryDirectory() as folder:
        file = packages.tasks_file(name, Path(folder), reward.variables)
        play = packages.play_of(file)
        tasks = [parse_json(line) for line in read_lines(file)]
    if play.by_turns:
        raise ValueError(
            f"--environment={name} has tasks of several turns; a completion of a file "
            f"is one. Try it in a run: scalerl train --config.environment={name}"
        )
    own = packages.own_of((name,), reward, end_of_thinking=after, prints=True)
    # The package gets the thinking too: it parts the completion itself.
    return _Judges(reward, _PackageRows(name, tasks).read, own, whole=True)


class _PackageRows:
    """Rows of a file with completions of a package's tasks."""

    def __init__(self, name: str, tasks: Sequence[dict[str, Any]]) -> None:
        """Look the tasks' last messages up by their texts."""
        self._name, self._tasks = name, tasks
        self._places: dict[str, list[int]] = {}
        for place, task in enumerate(tasks):
            said = task["messages"][-1]["content"]
            self._places.setdefault(str(said), []).append(place)

    def read(self, place: str, row: dict[str, Any]) -> _Row:
        """Read the row at a place of the file.

        Raises:
            Malformed: it has no completion, or does not name one of the tasks.
        """
        task = self._tasks[self._place(row)]
        told = {"verifier": task["verifier"], "answer": task["reference"]}
        return _Row(place, _completion(row), told)

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


def _read(path: Path, judges: _Judges) -> list[_Row]:
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


def _read_row(place: str, row: dict[str, Any]) -> _Row:
    """Read a row that a verifier of the package judges."""
    return _Row(place, _completion(row), _reference(row))


def _read_own_row(place: str, row: dict[str, Any]) -> _Row:
    """Read a row that the user's functions judge, as a run reads it."""
    draft = _draft(row, own=True)
    prompt = first(row, *_ASKING)
    shown = prompt if isinstance(prompt, str) or prompt is None else draft.text
    return _Row(place, _completion(row), draft.reference, shown or "")


def _completion(row: dict[str, Any]) -> str:
    completion = row.get("completion")
    if not isinstance(completion, str):
        raise Malformed("field 'completion' is missing, or is no text")
    return completion


def _draft(row: dict[str, Any], *, own: bool = False) -> Draft:
    """Read a row as one of prompts, of which it may lack what asks.

    `own`: the row may lack what it is judged by, too.
    """
    # The completion is judged, so it is no reference; what was asked with stays aside.
    aside = ("completion", *PARTS["tools"], *PICTURES)
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


def _judged(rows: Sequence[_Row], judges: _Judges) -> Iterator[_Judged]:
    """Yield the verdicts on rows, in the order of the rows."""
    found: dict[int, _Judged] = {}
    submitted, after = 0, judges.answer_after
    pool = make_pool(judges.reward, unnamed="math", own=judges.own)
    with contextlib.closing(pool):
        for number in range(len(rows)):
            while number not in found:
                while submitted < len(rows) and pool.pending < _AHEAD:
                    row = rows[submitted]
                    answer = row.completion
                    if after or not judges.whole:
                        answer = extract_answer(answer, answer_after=after)
                    pool.submit(
                        submitted, "any", [answer], row.reference, prompt=row.prompt
                    )
                    submitted += 1
                pool.wait(judges.reward.timeout_s)
                for each in pool.poll():
                    (verdict,) = each.judgements
                    found[each.key] = _Judged(rows[each.key].place, verdict)
            yield found.pop(number)
