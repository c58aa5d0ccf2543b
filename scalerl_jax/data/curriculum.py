"""The order of prompts by difficulty, and the file of measured pass rates it may read.

Few runs have one, and load this module.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scalerl_jax.types import Prompt
from scalerl_jax.utils.reading import check_regular, parse_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curriculum:
    """A curriculum: the prompts that are open at a step, and their order.

    With `open_steps` = 0 all are open and come sorted, the easiest first, without a
    shuffle, epoch after epoch: Tan et al., https://arxiv.org/abs/2509.25300, who sort
    by a model's pass rate.  Else those of the easiest share

        open(step) = min(1, open_share + (1 - open_share) * step / open_steps)

    come in a shuffled order, the linear competence of Platanios et al.,
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
        """Return how many of so many prompts are open; never none."""
        if not self.open_steps:
            return num_prompts
        gone = step / self.open_steps
        share = min(1.0, self.open_share + (1.0 - self.open_share) * gone)
        return max(1, round(share * num_prompts))


def text_digest(text: str) -> str:
    """Return the SHA-256 by which a file of pass rates knows a prompt's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_pass_rates(path: Path, prompts: Sequence[Prompt]) -> np.ndarray:
    """Read the measured pass rate [num_prompts] of each prompt, from JSON lines.

        {"prompt_id": 17, "pass_rate": 0.25}
        {"sha256": "9f86d081...", "pass_rate": 0.25}

    The second form names a prompt by the SHA-256 of its text in UTF-8, template
    included.  Other keys are left alone, and so are texts that no prompt has.

    Raises:
        ValueError: with the line that is wrong, or the first prompt that has none.
    """
    by_text = {text_digest(prompt.text): place for place, prompt in enumerate(prompts)}
    rates = np.full(len(prompts), np.nan)
    check_regular(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
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
    line: str, by_text: dict[str, int], *, num_prompts: int
) -> tuple[int | None, float]:
    """Place and pass rate; no place if the text is that of no prompt."""
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
