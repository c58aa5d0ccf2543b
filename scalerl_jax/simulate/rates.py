"""Seconds that the parts of a run take: of the machine, and not of the schedule.

`Rates` come from closed forms of a topology, from a file, or from measurements of a
run.  Nothing here knows who does what when.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of each part of a run.

    A decode call makes `sampler.tokens_per_call` tokens for each of n sequences, whose
    contexts have c tokens together:

        seconds = decode_s(n) + decode_context_s * c

    where `decode_s` are pairs (n, seconds), with straight lines between them.
    """

    decode_s: tuple[tuple[float, float], ...]
    decode_context_s: float = 0.0  # of a token of context, in each call
    prefill_s: float = 0.0  # of a chunk of sampler.prefill_tokens
    train_s: float = 0.0  # of an optimizer step, beside its tokens
    train_token_s: float = 0.0  # of a token of prompt or completion
    assemble_s: float = 0.0  # of the loop's own work between two steps
    publish_s: float = 0.0  # for which the learner is busy
    transfer_s: float = 0.0  # from then on, until a replica has the params
    place_s: float = 0.0  # in which a replica stands still for new params
    verify_s: float = 0.0  # from the last token of a group to its verdicts
    exchange_s: float = 0.0  # for a message between controller and replica
    checkpoint_s: float = 0.0  # for which the learner is busy

    def __post_init__(self) -> None:
        """Refuse what no machine has.

        Raises:
            ValueError: names the rate.
        """
        pairs = self.decode_s
        ordered = all(a[0] < b[0] for a, b in zip(pairs, pairs[1:], strict=False))
        if not pairs or pairs[0][0] < 0 or not ordered:
            raise ValueError(
                f"decode_s = {pairs} must be pairs [sequences, seconds] in the order "
                f"of the sequences, such as [[1, 0.1], [256, 0.2]]"
            )
        for _, seconds in pairs:
            _check("decode_s", seconds)
        if not any(seconds for _, seconds in pairs):
            raise ValueError(f"decode_s = {pairs} must be above 0 somewhere")
        for field in dataclasses.fields(self):
            if field.name != "decode_s":
                _check(field.name, getattr(self, field.name))

    def call_seconds(self, slots: int) -> list[float]:
        """Return the seconds of a call with 0 to `slots` sequences, without context."""
        known = np.array(self.decode_s)
        counts = np.arange(slots + 1)
        return np.interp(counts, known[:, 0], known[:, 1]).tolist()


def _check(name: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{name} = {seconds} must be a finite number, 0 or more")


def read_rates(path: str) -> Rates:
    """Return the rates of a JSON file, an object with the fields of `Rates`.

    Raises:
        ValueError: it holds something else.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--rates={path} is no JSON file: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--rates={path} must hold one JSON object")
    known = [field.name for field in dataclasses.fields(Rates)]
    for name in found:
        if name not in known:
            raise ValueError(
                f"--rates={path}: {name!r} is no rate; choose from {known}"
            )
    if "decode_s" not in found:
        raise ValueError(f"--rates={path} lacks decode_s, pairs [sequences, seconds]")
    try:
        return Rates(
            decode_s=_pairs(found.pop("decode_s")),
            **{name: _number(name, value) for name, value in found.items()},
        )
    except ValueError as error:
        raise ValueError(f"--rates={path}: {error}") from error


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} = {str(value)[:50]!r} must be a number of seconds")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a number of seconds") from None


def _pairs(value: Any) -> tuple[tuple[float, float], ...]:
    rows = value if isinstance(value, list) else [value]
    if not all(isinstance(row, list) and len(row) == 2 for row in rows):
        raise ValueError("decode_s must be a list of pairs [sequences, seconds]")
    return tuple(
        (_number("decode_s", count), _number("decode_s", seconds))
        for count, seconds in rows
    )
