"""The directory of an evaluation: written under another name until it is whole."""

import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.evals.evaluate import Judged
from scalerl_jax.evaluate.viewer import read_rows, write_page

SUMMARY_FILE, SAMPLES_FILE, PAGE_FILE = "summary.json", "samples.jsonl", "viewer.html"
_PARTIAL = ".partial"  # what a killed evaluation leaves behind ends so


class Results:
    """Rows as prompts finish, in the order of the sets; `finish` makes the rest."""

    def __init__(self, out: Path) -> None:
        """Make the directory in which it is written.

        Raises:
            ValueError: there is something already, or it cannot be written.
        """
        self._out = out
        self._partial = out.with_name(out.name + _PARTIAL)
        self._held: dict[int, str] = {}  # lines whose predecessors are not done
        self._next = 0
        try:
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise ValueError(f"--out={out} is there already; name another")
            out.parent.mkdir(parents=True, exist_ok=True)
            self._partial.mkdir()
            file = self._partial / SAMPLES_FILE
            self._file = open(file, "w", encoding="utf-8", buffering=1)  # by line
        except FileExistsError as error:
            raise ValueError(
                f"{self._partial} is there: an evaluation is running or was killed; "
                f"remove it, or name another --out"
            ) from error
        except OSError as error:
            raise ValueError(f"--out={out} cannot be written: {error}") from error

    def __enter__(self) -> "Results":
        """Itself: the file of rows is open."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file of rows; an evaluation without any leaves nothing."""
        self._file.close()
        if self._partial.exists() and not self._next and not self._held:
            shutil.rmtree(self._partial)

    def add(self, number: int, row: dict[str, Any]) -> None:
        """The row of a prompt, numbered over all sets; written after those before."""
        self._held[number] = json.dumps(row, allow_nan=False)
        while self._next in self._held:
            self._file.write(self._held.pop(self._next) + "\n")
            self._next += 1

    def finish(self, summary: dict[str, Any], *, title: str, note: str) -> None:
        """The summary and the page; then the directory gets its name."""
        for number in sorted(self._held):  # of an evaluation that was interrupted
            self._file.write(self._held[number] + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_page(
            self._partial / PAGE_FILE,
            read_rows(self._partial / SAMPLES_FILE),
            title=title,
            note=note,
        )
        with open(self._partial / SUMMARY_FILE, "w", encoding="utf-8") as file:
            json.dump(summary, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        self._partial.rename(self._out)


def row_of(
    group: Judged,
    answers: list[str | None],
    *,
    name: str,
    tokenizer: Tokenizer,
    answer_after: str,
) -> dict[str, Any]:
    """A prompt and its samples as JSON values; `answers` are what a reader looks for.

    `logprobs` are nats, at the temperature of sampling and without top-k, top-p and
    min-p; null where a token was forced.  `answer_start` is where in the completion
    the last end of thinking is over; null if it never ends.
    """
    prompt, samples = group.prompt, []
    for completion, answer, status in zip(
        group.completions, answers, group.statuses, strict=True
    ):
        tokens = completion.tokens.tolist()
        texts = tokenizer.written.texts(tokens)
        samples.append(
            {
                "completion": "".join(texts),
                "answer": answer,
                "verdict": status,
                "tokens": len(texts),
                "cut_off": completion.cut_off,
                "interrupted": completion.interrupted,
                "answer_start": tokenizer.answer_start(
                    tokens, answer_after=answer_after
                ),
                "token_texts": texts,
                "logprobs": [
                    round(float(value), 4) if sampled else None
                    for value, sampled in zip(
                        completion.full_logprobs, completion.mask, strict=True
                    )
                ],
            }
        )
    return {
        "id": f"{name}/{prompt.prompt_id}",
        "set": name,
        "task": prompt.task,
        "reference_id": prompt.reference.get("id"),
        "prompt": prompt.text,
        "reference": prompt.reference.get("answer"),
        "detail": group.detail,
        "samples": samples,
    }
