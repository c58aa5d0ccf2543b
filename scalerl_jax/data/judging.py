"""Judging the completions of a file: `scalerl judge FILE`.

Rows have a `completion`, and an `answer` or `tests` as rows of prompts have them.  The
verdicts are those of a run with the same settings.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from scalerl_jax.config import SETTINGS, MathAnswer, RewardConfig
from scalerl_jax.data.drafts import Malformed, maths
from scalerl_jax.data.files import read_rows
from scalerl_jax.data.own import read_reference
from scalerl_jax.data.questions import extract_answer
from scalerl_jax.environments import sandbox
from scalerl_jax.environments.judges import code
from scalerl_jax.environments.pool import make_pool
from scalerl_jax.environments.verdict import Status
from scalerl_jax.process.ending import Parser, answer
from scalerl_jax.process.printing import to_stderr, to_stdout

_AHEAD = 64  # rows submitted and not judged, for each process


class _Row(NamedTuple):
    """A completion, where it stands, and what to judge it by."""

    place: str
    completion: str
    reference: dict[str, Any]


class _Judged(NamedTuple):
    """The verdict on a row."""

    place: str
    status: Status
    detail: str


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


_SETTINGS = (
    "timeout_s num_workers memory_mib math_answer code_cpu_s code_memory_mib "
    "code_packages code_float_tolerance"
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
    reward = RewardConfig(**settings)
    rows = _read(flags.file)
    if any(row.reference["verifier"] == "code" for row in rows):
        sandbox.check(reward.code_packages)
    counts: collections.Counter[Status] = collections.Counter()
    for judged in _judged(rows, reward, answer_after=flags.answer_after):
        counts[judged.status] += 1
        if flags.json:
            to_stdout(json.dumps(judged._asdict()) + "\n")
        else:
            to_stdout("  ".join(filter(None, judged)) + "\n")
    shares = [f"{name} {n} ({n / len(rows):.1%})" for name, n in counts.most_common()]
    summary = f"{len(rows):,} rows: {', '.join(shares)}\n"
    (to_stderr if flags.json else to_stdout)(summary)


def _read(path: Path) -> list[_Row]:
    """The rows of a file.

    Raises:
        ValueError: one of them cannot be judged, or there are none.
    """
    rows = []
    for place, row, reason in read_rows(path):
        try:
            if row is None:
                raise Malformed(reason)
            rows.append(_Row(place, _completion(row), _reference(row)))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def _completion(row: dict[str, Any]) -> str:
    completion = row.get("completion")
    if not isinstance(completion, str):
        raise Malformed("field 'completion' is missing, or is no text")
    return completion


def _reference(row: dict[str, Any]) -> dict[str, Any]:
    # Its completion is what is judged.
    told = {name: each for name, each in row.items() if name != "completion"}
    verifier, judged_by = read_reference(told)
    if verifier == "math":
        return maths("any", judged_by).reference
    reference = {"verifier": "code", "tests": judged_by}
    code.read_tests(reference)
    return reference


def _judged(
    rows: Sequence[_Row], reward: RewardConfig, *, answer_after: str
) -> Iterator[_Judged]:
    """The verdicts on rows, in their order."""
    found: dict[int, _Judged] = {}
    submitted = 0
    with contextlib.closing(make_pool(reward, unnamed="math")) as pool:
        for number in range(len(rows)):
            while number not in found:
                while submitted < len(rows) and pool.pending < _AHEAD:
                    row = rows[submitted]
                    answer = extract_answer(row.completion, answer_after=answer_after)
                    pool.submit(submitted, "any", [answer], row.reference)
                    submitted += 1
                pool.wait(reward.timeout_s)
                for key, (status,), detail in pool.poll():
                    found[key] = _Judged(rows[key].place, status, detail)
            yield found.pop(number)
