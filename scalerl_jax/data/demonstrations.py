"""Worked solutions for the small policy's base checkpoint, careful and careless.

A base model knows how to do better than it does: its samples mix sound methods with
slips and guesses.  So do these texts.  Each is what follows `<think>`: a scratchpad,
`</think>` and an answer.  Nothing here is used in reinforcement learning.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np

END_OF_THINKING = "</think>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Styles:
    """Shares of demonstrations by how they go about it, in [0, 1]."""

    careful: float  # every step right
    careless: float  # each step goes wrong with probability `slip`
    slip: float
    hesitation: float  # share that opens with some "hm" tokens
    # The rest guesses: no steps, and an answer that looks right.


def demonstrate(
    task: str,
    text: str,
    reference: dict[str, Any],
    *,
    styles: Styles,
    interruption: Callable[[np.random.Generator], str],
    rng: np.random.Generator,
) -> str:
    """Write a completion of the prompt of `text`, in a style drawn from `styles`.

    `interruption` gives the text of a thinking that was cut short, which now and then
    precedes a guess: the policy must be able to answer after one.
    """
    draw = rng.random()
    hesitation = (
        "hm " * int(rng.geometric(0.3)) if rng.random() < styles.hesitation else ""
    )
    if draw < styles.careful + styles.careless:
        slip = 0.0 if draw < styles.careful else styles.slip
        scratch, answer = SOLVERS[task](text, slip, rng)
        return f"{hesitation}{scratch}{END_OF_THINKING}{answer}"
    _, answer = SOLVERS[task](text, 1.0, rng)
    if rng.random() < 0.2:
        return f"{interruption(rng)}{answer}"
    return f"{hesitation}{END_OF_THINKING}{answer}"


def _slipped(value: int, slip: float, rng: np.random.Generator) -> int:
    """The value, or with probability `slip` one that is close to it."""
    if rng.random() >= slip:
        return value
    change = int(rng.choice([-10, -2, -1, 1, 2, 10]))
    return value + change


def _solve_chain_sum(
    text: str, slip: float, rng: np.random.Generator
) -> tuple[str, str]:
    """Left to right: `12+7=19;19-4=15`."""
    terms = re.findall(r"([+-]?) ?(\d+)", text.split(":")[1])
    total, steps = int(terms[0][1]), []
    for sign, digits in terms[1:]:
        value = total + int(f"{sign}{digits}")
        value = _slipped(value, slip, rng)
        steps.append(f"{total}{sign}{digits}={value}")
        total = value
    return ";".join(steps), str(total)


def _solve_products(
    text: str, slip: float, rng: np.random.Generator
) -> tuple[str, str]:
    """Multiply by the digits of the second factor: `34*7=238;34*20=680;238+680=918`."""
    left, right = (int(part) for part in re.findall(r"\d+", text.split(":")[1]))
    ones, tens = right % 10, right - right % 10
    total = _slipped(left * ones, slip, rng)
    steps = [f"{left}*{ones}={total}"]
    if tens:
        part = _slipped(left * tens, slip, rng)
        whole = _slipped(total + part, slip, rng)
        steps += [f"{left}*{tens}={part}", f"{total}+{part}={whole}"]
        total = whole
    return ";".join(steps), str(total)


def _solve_spell_backward(
    text: str, slip: float, rng: np.random.Generator
) -> tuple[str, str]:
    """Letters numbered in order, then the answer from the last: `1s2u3n`."""
    word = text.rsplit(" ", 1)[1]
    letters = [
        str(rng.choice(list(word))) if rng.random() < slip / 2 else letter
        for letter in word
    ]
    scratch = "".join(f"{place}{letter}" for place, letter in enumerate(letters, 1))
    return scratch, "".join(reversed(letters))


def _solve_letter_counting(
    text: str, slip: float, rng: np.random.Generator
) -> tuple[str, str]:
    """The text again, each hit followed by the running count: `ban1an2`."""
    target, span = re.findall(r'"([^"]*)"', text)
    count, scratch = 0, []
    for letter in span:
        hit = (letter == target) != (rng.random() < slip / 6)
        count += hit
        scratch.append(f"{letter}{count}" if hit else letter)
    return "".join(scratch), str(count)


# task -> (text of the question, slip, rng) -> scratchpad, answer
SOLVERS: dict[str, Callable[[str, float, np.random.Generator], tuple[str, str]]] = {
    "chain_sum": _solve_chain_sum,
    "chain_sum_long": _solve_chain_sum,
    "products": _solve_products,
    "spell_backward": _solve_spell_backward,
    "letter_counting": _solve_letter_counting,
}
