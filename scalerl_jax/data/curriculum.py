"""The order of prompts by difficulty, and the file of measured pass rates it may read.

Only runs with a curriculum load this module.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_jax.config import DataConfig, naming
from scalerl_jax.data.prompts import (
    NEVER,
    PromptStream,
    read_numbers,
    save_numbers,
)
from scalerl_jax.data.questions import with_unlike
from scalerl_jax.formats.bounded import read_lines
from scalerl_jax.formats.reading import parse_json
from scalerl_jax.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curriculum:
    """A curriculum: the prompts that are open at a step, and their order.

    With `open_steps` = 0 all are open and come sorted, the easiest first, without a
    shuffle, epoch after epoch: Tan et al., https://arxiv.org/abs/2509.25300, who sort
    by a model's pass rate.  Otherwise the easiest share

        open(step) = min(1, open_share + (1 - open_share) * step / open_steps)

    is open, in a shuffled order: the linear competence of Platanios et al.,
    https://arxiv.org/abs/1903.09848, equation 6, with open_share for c_0.
    """

    pass_rates: np.ndarray | None  # [num_prompts]; None: as the run measures them
    open_share: float = 1.0
    open_steps: int = 0  # optimizer steps

    @property
    def is_sorted(self) -> bool:
        """Return whether the easiest come first, not merely open first."""
        return self.open_steps == 0

    def num_open(self, num_prompts: int, *, step: int) -> int:
        """Return the number of prompts, of `num_prompts`, that are open; 1 at least."""
        if not self.open_steps:
            return num_prompts
        gone = step / self.open_steps
        share = min(1.0, self.open_share + (1.0 - self.open_share) * gone)
        return max(1, round(share * num_prompts))


def easiest_first(pass_rates: np.ndarray) -> np.ndarray:
    """Return the indices of pass rates, highest first; unmeasured (NaN) ones last.

    Equal pass rates keep their order.
    """
    return np.argsort(-pass_rates, kind="stable")


class CurriculumStream(PromptStream):
    """Prompts in the order of a curriculum.

    Each epoch is sorted by difficulty, and the hardest of the prompts that are not
    retired are closed.  If the run measures the difficulty itself, the first epoch is
    shuffled and open, and each later one is sorted by the history at its start.  The
    next prompt is the open one that was drawn least often, so that a prompt that opens
    in the middle of an epoch comes at once.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        max_pass_rate: float | None,
        curriculum: Curriculum,
    ) -> None:
        """Begin epoch 0 with no history."""
        self._curriculum = curriculum
        self._difficulty = curriculum.pass_rates  # this epoch is sorted by these
        self._easiest = np.empty(0, np.int64)  # prompts left, the easiest first
        super().__init__(prompts, seed=seed, max_pass_rate=max_pass_rate)

    def state(self) -> dict[str, Any]:
        """Return the position, the history and the difficulty, as JSON values."""
        if self._difficulty is None:
            return super().state()
        return super().state() | {"difficulty": save_numbers(self._difficulty)}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from `state`.

        Raises:
            ValueError: it was saved with other prompts or in another order.
        """
        rates = state["difficulty"]
        self._difficulty = None if rates is None else read_numbers(rates)
        super().restore(state)

    def _least_drawn(self, step: int) -> int:
        if self._difficulty is None:
            return super()._least_drawn(step)
        if len(self._easiest) != self._left:  # within an epoch they only get fewer
            left = np.flatnonzero(self._turns != NEVER)
            self._easiest = left[easiest_first(self._difficulty[left])]
        opened = self._easiest[: self._curriculum.num_open(self._left, step=step)]
        return int(opened[self._turns[opened].argmin()])

    def _begin_epoch(self, epoch: int) -> None:
        if self._curriculum.pass_rates is None:
            measured = np.where(self._rollouts > 0, self._rollouts, np.nan)
            self._difficulty = self._passed / measured
        super()._begin_epoch(epoch)

    def _epoch_order(self) -> np.ndarray:
        self._easiest = np.empty(0, np.int64)
        if self._difficulty is None or not self._curriculum.is_sorted:
            return super()._epoch_order()
        return easiest_first(self._difficulty)


def make_streams(
    parts: Sequence[Sequence[Prompt]],
    prompts: Sequence[Prompt],
    data: DataConfig,
    *,
    seed: int,
    max_pass_rate: float | None,
) -> list[CurriculumStream]:
    """Return a stream for each part; `prompts` are the parts laid end to end.

    Raises:
        ValueError: data.difficulty is not a file of the prompts' pass rates.
    """
    rates: list[np.ndarray | None] = [None] * len(parts)
    if data.difficulty != "measured":
        with naming("data.difficulty"):
            whole = read_pass_rates(Path(data.difficulty), prompts)
        rates = [*np.split(whole, np.cumsum([len(part) for part in parts])[:-1])]
    return [
        CurriculumStream(
            part,
            seed=seed,
            max_pass_rate=max_pass_rate,
            curriculum=Curriculum(
                pass_rates=own, open_share=data.open_share, open_steps=data.open_steps
            ),
        )
        for part, own in zip(parts, rates, strict=True)
    ]


def prompt_digest(prompt: Prompt) -> str:
    """Return the SHA-256 by which a file of pass rates names a prompt.

    It is that of the text, with what tells apart an environment's tasks of one text.
    """
    text = with_unlike(prompt.text, prompt.reference)
    return hashlib.sha256(text.encode()).hexdigest()


def read_pass_rates(path: Path, prompts: Sequence[Prompt]) -> np.ndarray:
    """Read the measured pass rate [num_prompts] of each prompt, from JSON lines.

        {"prompt_id": 17, "pass_rate": 0.25}
        {"sha256": "9f86d081...", "pass_rate": 0.25}

    The second form names a prompt by the SHA-256 of its text in UTF-8, template
    included (`prompt_digest`).  Other keys are ignored, and so are texts that no prompt
    has.

    Raises:
        ValueError: names the invalid line, or the first prompt without a pass rate.
    """
    by_text = {prompt_digest(prompt): place for place, prompt in enumerate(prompts)}
    rates = np.full(len(prompts), np.nan)
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            place, rate = _read_line(line, by_text, num_prompts=len(prompts))
            if place is not None and not np.isnan(rates[place]):
                raise ValueError(f"prompt {place} was named before")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if place is not None:
            rates[place] = rate
    missing = np.flatnonzero(np.isnan(rates))
    if len(missing):
        raise ValueError(
            f"{path} has no pass rate for {len(missing)} of {len(prompts)} prompts; "
            f"the first is prompt {missing[0]}: {prompts[missing[0]].text[:60]!r}; "
            f"measure them too, or lower data.train_prompts"
        )
    return rates


def _read_line(
    line: bytes, by_text: dict[str, int], *, num_prompts: int
) -> tuple[int | None, float]:
    """Return a prompt's index and pass rate; the index is None if no prompt matches."""
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError(f"{row!r} is not an object with a pass_rate")
    rate = row.get("pass_rate")
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise ValueError(f"pass_rate = {rate!r} must be a number")
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"pass_rate = {rate} must be in [0, 1]")
    if ("prompt_id" in row) == ("sha256" in row):
        raise ValueError("it must have prompt_id or sha256, and not both")
    if "sha256" in row:
        return by_text.get(row["sha256"]), float(rate)
    place = row["prompt_id"]
    if type(place) is not int or not 0 <= place < num_prompts:
        raise ValueError(f"prompt_id = {place!r} must be from 0 to {num_prompts - 1}")
    return place, float(rate)
