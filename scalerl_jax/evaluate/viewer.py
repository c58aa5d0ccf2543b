"""One HTML page to read rollouts in: opens offline, nothing is fetched.

The template is `assets/viewer/viewer.html`.  Each prompt is a JSON text of its own,
which the page reads when it is looked at or searched; everything that a model wrote
reaches the page as text nodes alone.
"""

import html
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import scalerl_jax
from scalerl_jax.utils.reading import check_regular, parse_json

_TEMPLATE = Path(scalerl_jax.__file__).parent / "assets" / "viewer" / "viewer.html"
_DATA = "<!-- data -->"  # in the template, where the prompts go
_SNIPPET = 160  # letters of a prompt in the list


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The prompts of a samples.jsonl or of a run's rollouts.jsonl.

    Raises:
        ValueError: the file cannot be read, or a line of it is neither.
    """
    check_regular(path)
    try:
        with open(path, encoding="utf-8") as file:
            lines = (line for line in file if line.strip())
            rows = (parse_json(line) for line in lines)
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


def write_page(
    path: Path, rows: Iterable[dict[str, Any]], *, title: str, note: str
) -> int:
    """Write the page, row by row; the number of prompts."""
    before, after = _TEMPLATE.read_text(encoding="utf-8").split(_DATA)
    entries: list[dict[str, Any]] = []
    # A lone surrogate, which UTF-8 lacks, is written as JSON's own escape.
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(before.replace("{{title}}", html.escape(title)))
        for number, row in enumerate(rows):
            file.write(_data(f"p{number}", _compact(row)))
            entries.append(_entry(row))
        file.write(_data("index", {"note": note, "prompts": entries}))
        file.write(after)
    return len(entries)


def _data(name: str, value: Any) -> str:
    # Without "<" no text can end the element or begin a comment in it.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def _entry(row: dict[str, Any]) -> dict[str, Any]:
    """What the list shows of a prompt."""
    return {
        "id": row["id"],
        "set": row["set"],
        "task": row["task"],
        "snippet": _end_of(row["prompt"]),
        "verdicts": [sample["verdict"] for sample in row["samples"]],
    }


def _end_of(prompt: str) -> str:
    """The last words: what comes first is often the same in all."""
    end = prompt[-_SNIPPET:]
    return end if end == prompt else "… " + end.partition(" ")[2]


def _compact(row: dict[str, Any]) -> dict[str, Any]:
    """The same with numbers for tokens: UTF-16 units, and thousandths of nats."""
    samples = []
    for sample in row["samples"]:
        short = {
            name: value
            for name, value in sample.items()
            if name not in ("token_texts", "logprobs", "answer_start")
        }
        start = sample["answer_start"]
        short["start"] = None if start is None else _units(sample["completion"][:start])
        if "logprobs" in sample:
            short["lengths"] = [_units(text) for text in sample["token_texts"]]
            short["nats"] = [
                None if value is None else round(-1000 * value)
                for value in sample["logprobs"]
            ]
        samples.append(short)
    return {**row, "samples": samples}


def _units(text: str) -> int:
    """The length of a text as JavaScript counts."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def _by_prompt(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rollouts of a run, those of a prompt together, step by step."""
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
    start = row.get("answer_start", 0)  # runs of before do not say: show all of it
    return {
        "label": f"step {row['step']}",
        "completion": text,
        "answer": None if start is None else text[start:],
        "verdict": row["status"],
        "tokens": row["tokens"],
        "cut_off": row["cut_off"],
        "interrupted": row["interrupted"],
        "answer_start": start,
    }
