"""The output directory of an evaluation, and its page of samples that opens offline.

The page's template is `assets/viewer/viewer.html`.  Each prompt is a separate JSON
text, which the page parses when the prompt is shown or searched; everything that a
model wrote enters the page as text nodes only.
"""

import codecs
import contextlib
import html
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import scalerl_jax
from scalerl_jax.config import MathAnswer
from scalerl_jax.environments.judges.code import find_solution
from scalerl_jax.environments.own_file import TOOLS
from scalerl_jax.evaluate.policy import Described
from scalerl_jax.formats.bounded import read_lines
from scalerl_jax.formats.reading import parse_json
from scalerl_jax.generation.evaluation import (
    JudgedPrompt,
    prompt_text,
    reward_of,
    turns_of,
)
from scalerl_jax.process.full_disk import naming
from scalerl_jax.run.writing import replace_file, replacing

# Fields that not all rows have.
_OF_EPISODES = ("turns", "reward", "reward_parts", "detail")
SUMMARY_FILE, SAMPLES_FILE, PAGE_FILE = "summary.json", "samples.jsonl", "viewer.html"
_PARTIAL = ".partial"  # ending of the directory of an unfinished evaluation
_TEMPLATE = Path(scalerl_jax.__file__).parent / "assets" / "viewer" / "viewer.html"
_DATA = "<!-- data -->"  # in the template, where the prompts go
_SNIPPET = 160  # letters of a prompt in the list


@contextlib.contextmanager
def open_results(out: Path) -> Iterator["Results"]:
    """Open a directory, which has a temporary name until it is complete.

    Raises:
        ValueError: it already exists and is not empty, or it cannot be written.
    """
    partial = out.with_name(out.name + _PARTIAL)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"--out={out} already exists; name another")
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        file = open(partial / SAMPLES_FILE, "w", encoding="utf-8", buffering=1)
    except FileExistsError as error:
        raise ValueError(
            f"{partial} exists: an evaluation is running or was killed; remove it, "
            f"or name another --out"
        ) from error
    except OSError as error:
        raise ValueError(f"--out={out} cannot be written: {error}") from error
    results = Results(out, partial, file)
    try:
        with naming(f"--out={out}"):
            yield results
    finally:
        with contextlib.suppress(OSError):  # a full disk, already reported
            file.close()
        if partial.exists() and results.empty:
            shutil.rmtree(partial)


class Results:
    """Writer of a row per prompt in the order of the sets; `finish` writes the rest."""

    def __init__(self, out: Path, partial: Path, file: TextIO) -> None:
        """Start with an empty `file` in the directory `partial`."""
        self._out, self._partial, self._file = out, partial, file
        self._held: dict[int, str] = {}  # lines that wait for earlier ones
        self._next = 0

    @property
    def empty(self) -> bool:
        """Return whether no row was added."""
        return not self._next and not self._held

    def add(self, number: int, row: dict[str, Any]) -> None:
        """Write the row of a prompt, in the order of numbers, which span all sets."""
        self._held[number] = json.dumps(row, allow_nan=False)
        while self._next in self._held:
            self._file.write(self._held.pop(self._next) + "\n")
            self._next += 1

    def finish(self, summary: dict[str, Any], *, title: str, note: str) -> None:
        """Write the summary and the page, and give the directory its final name."""
        for number in sorted(self._held):  # of an evaluation that was interrupted
            self._file.write(self._held[number] + "\n")
        _close(self._file)
        rows = read_rows(self._partial / SAMPLES_FILE)
        write_page(self._partial / PAGE_FILE, rows, title=title, note=note)
        text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
        replace_file(self._partial / SUMMARY_FILE, text.encode())
        self._partial.rename(self._out)


def _close(file: TextIO) -> None:
    """Write a file to disk and close it."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def final_answer(
    given: str | None, reference: dict[str, Any], *, math_answer: MathAnswer
) -> tuple[str | None, str | None]:
    r"""Return the answer in the text that a verifier was given, and the answer's vote.

    For maths the answer is the content of the last \boxed{} or the last number, as
    reward.math_answer says.  Votes that differ only in spaces and delimiters are equal;
    "1/2" and "0.5" are two votes, whatever their verdicts, as the verifier compares
    with the reference only.  Programs have no vote.  A missing answer or vote is None.
    """
    if given is None:
        return None, None
    verifier = reference.get("verifier")
    if verifier == "code":
        return find_solution(given, reference), None
    if verifier != "math":
        return given, " ".join(given.split()) or None
    # Here and not above: math-verify takes a second to import.
    from scalerl_jax.environments.judges import maths

    found = maths.find_answer(given, math_answer)
    return found, maths.normalized(found) or None if found else None


def can_vote(reference: dict[str, Any], environment: str) -> bool:
    """Return whether equal answers to a prompt are known to be equally right.

    They are not for programs, nor for the user's own functions and environments, which
    read of a completion what they like.
    """
    own = environment not in ("", TOOLS)
    return not own and reference.get("verifier") != "code"


def row_of(
    group: JudgedPrompt, described: Described, *, name: str
) -> tuple[dict[str, Any], list[str | None] | None]:
    """Return a prompt of the set `name` and its samples as JSON values, and the votes.

    `logprobs` are nats, at the temperature of sampling and without top-k, top-p and
    min-p; null where a token was forced.  `answer_start` is the offset in the
    completion after the last end of thinking; null if thinking never ends.  No votes:
    the answers cannot be compared (`can_vote`).
    """
    config, tokenizer, prompt = described.config, described.tokenizer, group.prompt
    answers = [
        final_answer(each, prompt.reference, math_answer=config.reward.math_answer)
        for each in group.answers
    ]
    samples = []
    for completion, turns, (answer, _), verdict in zip(
        group.completions, group.turns, answers, group.verdicts, strict=True
    ):
        tokens = completion.tokens.tolist()
        texts = tokenizer.written.texts(tokens)
        samples.append(
            {
                "completion": "".join(texts),
                "answer": answer,
                "verdict": verdict.status,
                "tokens": len(texts),
                "cut_off": completion.cut_off,
                "interrupted": completion.interrupted,
                "answer_start": tokenizer.answer_start(
                    tokens, answer_after=config.data.answer_after
                ),
                **turns_of(turns, tokenizer, tokens),
                **reward_of(verdict),
                "token_texts": texts,
                "logprobs": [
                    round(float(value), 4) if sampled else None
                    for value, sampled in zip(
                        completion.full_logprobs, completion.mask, strict=True
                    )
                ],
            }
        )
    row = {
        "id": f"{name}/{prompt.prompt_id}",
        "set": name,
        "task": prompt.task,
        "reference_id": prompt.reference.get("id"),
        "prompt": prompt_text(prompt, group.turns[0], tokenizer),
        "reference": prompt.reference.get("answer"),
        "detail": group.detail,
        "samples": samples,
    }
    votes = can_vote(prompt.reference, config.environment)
    return row, [vote for _, vote in answers] if votes else None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the prompts of a samples.jsonl or of a run's rollouts.jsonl.

    Raises:
        ValueError: the file cannot be read, or a line is of neither kind.
    """
    lines = read_lines(path)
    try:
        rows = (parse_json(line) for line in lines if line.strip())
        first = next(rows, None)
        if first is None:
            raise ValueError("it is empty")
        if "samples" in first:
            yield first
            yield from rows
        else:
            yield from _by_prompt([first, *rows])
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} holds no rollouts: {said}") from error


def _by_prompt(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rollouts of a run, grouped by prompt, in the order of steps."""
    prompts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        prompts.setdefault((row["task"], row["prompt"]), []).append(row)
    for number, ((task, prompt), group) in enumerate(prompts.items()):
        yield {
            "id": f"{task}/{number}",
            "set": task,
            "task": task,
            "prompt": prompt,
            "reference": group[0]["reference"],
            "samples": [_sample_of(row) for row in group],
        }


def _sample_of(row: dict[str, Any]) -> dict[str, Any]:
    text = row["completion"]
    start = row.get("answer_start", 0)  # older runs lack it: show all
    return {
        "label": f"step {row['step']}",
        "completion": text,
        "answer": None if start is None else text[start:],
        "verdict": row["status"],
        "answer_start": start,
        **{name: row[name] for name in ("tokens", "cut_off", "interrupted")},
        **{name: row[name] for name in _OF_EPISODES if name in row},
    }


def write_page(
    path: Path, rows: Iterable[dict[str, Any]], *, title: str, note: str
) -> int:
    """Write the page, row by row, and return the number of prompts."""
    before, after = _TEMPLATE.read_text(encoding="utf-8").split(_DATA)
    entries: list[dict[str, Any]] = []
    # A lone surrogate, which UTF-8 lacks, is written as JSON's own escape.
    with replacing(path) as page:
        file = codecs.getwriter("utf-8")(page, "backslashreplace")
        file.write(before.replace("{{title}}", html.escape(title)))
        for number, row in enumerate(rows):
            file.write(_data(f"p{number}", _compact(row)))
            entry = {name: row[name] for name in ("id", "set", "task")}
            verdicts = [sample["verdict"] for sample in row["samples"]]
            entries.append(
                entry | {"snippet": _end_of(row["prompt"]), "verdicts": verdicts}
            )
        file.write(_data("index", {"note": note, "prompts": entries}))
        file.write(after)
    return len(entries)


def _data(name: str, value: Any) -> str:
    # Without "<" no text can end the element or begin a comment in it.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def _end_of(prompt: str) -> str:
    """Return the last words of a prompt; the first ones are often equal in all."""
    end = prompt[-_SNIPPET:]
    return end if end == prompt else "… " + end.partition(" ")[2]


def _compact(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with numbers for tokens: UTF-16 units, and thousandths of nats."""
    samples = []
    for sample in row["samples"]:
        short = dict(sample)
        start = short.pop("answer_start")
        texts, logprobs = short.pop("token_texts", []), short.pop("logprobs", None)
        text = sample["completion"]
        short["start"] = None if start is None else _units(text[:start])
        if "turns" in sample:
            short["turns"] = [
                turn | {"end": _units(text[: turn["end"]])} for turn in sample["turns"]
            ]
        if logprobs is not None:
            short["lengths"] = [_units(text) for text in texts]
            short["nats"] = [
                None if value is None else _thousandths(value) for value in logprobs
            ]
        samples.append(short)
    return {**row, "samples": samples}


def _thousandths(logprob: float) -> int:
    """Return -1000 times a log-probability.

    Raises:
        ArithmeticError: it is not finite.
    """
    if not math.isfinite(1000 * logprob):
        raise ArithmeticError(f"a log-probability of {logprob}")
    return round(-1000 * logprob)


def _units(text: str) -> int:
    """Return the length of a text in UTF-16 units, as JavaScript counts."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
