"""From verdicts to figures with standard errors, and the table that shows them."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

import numpy as np

from scalerl_jax.evals.evaluate import Judged
from scalerl_jax.evals.metrics import (
    counts_up_to,
    majority_at_k,
    pass_at_k,
    standard_error,
)
from scalerl_jax.rewards.verdict import Status

T = TypeVar("T")
_QUANTILES = (0.1, 0.5, 0.9, 0.99)
_NAME_WIDTH, _WIDTH = 24, 16  # letters of the table's columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the figures need of one prompt; each list has a value per sample."""

    statuses: Sequence[Status]
    judged: Sequence[bool]  # False: no figure but of lengths and verdicts counts it
    votes: Sequence[str | None] | None  # None: its answers cannot be compared
    tokens: Sequence[int]
    cut_off: Sequence[bool]
    interrupted: Sequence[bool]

    @classmethod
    def of(cls, group: Judged, votes: Sequence[str | None] | None) -> "Outcome":
        """A judged prompt without its tokens."""
        return cls(
            statuses=group.statuses,
            judged=group.judged,
            votes=votes,
            tokens=[len(each.tokens) for each in group.completions],
            cut_off=[each.cut_off for each in group.completions],
            interrupted=[each.interrupted for each in group.completions],
        )

    @property
    def passed(self) -> list[bool]:
        """Whether each judged sample is correct."""
        return [status == "correct" for status in self._judged(self.statuses)]

    @property
    def judged_votes(self) -> list[str | None] | None:
        """The vote of each judged sample."""
        return None if self.votes is None else self._judged(self.votes)

    def _judged(self, values: Sequence[T]) -> list[T]:
        return list(itertools.compress(values, self.judged))


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of a set, as JSON values; "se" is null for a single prompt.

    Every value is a mean over prompts, and its standard error the one over prompts
    (`metrics.standard_error`): of mean@n, of each pass@k and maj@k, and of the shares
    and lengths, a prompt's own mean.  maj@k is null where answers are programs.

    Unjudged samples are left out of mean@n, pass@k and maj@k, which are over the
    prompts that have a judged one, or k of them; null where none has.
    """
    num_samples = len(outcomes[0].statuses)
    counts = counts_up_to(num_samples)
    unjudged = num_samples - np.array([len(outcome.passed) for outcome in outcomes])
    lengths = np.array([outcome.tokens for outcome in outcomes])
    quantiles = np.quantile(lengths, _QUANTILES)
    return {
        "prompts": len(outcomes),
        "samples_per_prompt": num_samples,
        "unjudged": {
            "samples": int(unjudged.sum()),
            "prompts": int((unjudged == num_samples).sum()),  # without any other
        },
        "mean": _mean([np.mean(each.passed) for each in outcomes if each.passed]),
        "pass_at": {str(k): _mean(_pass_at(outcomes, k)) for k in counts},
        "majority_at": None
        if any(outcome.votes is None for outcome in outcomes)
        else {str(k): _mean(_majority_at(outcomes, k)) for k in counts},
        "completion_tokens": _mean(lengths.mean(axis=1))
        | {
            "quantiles": {
                str(share): float(value)
                for share, value in zip(_QUANTILES, quantiles, strict=True)
            },
            "total": int(lengths.sum()),
        },
        "cut_off": _mean([np.mean(outcome.cut_off) for outcome in outcomes]),
        "interrupted": _mean([np.mean(outcome.interrupted) for outcome in outcomes]),
        "verdicts": {
            status: float(
                np.mean([outcome.statuses.count(status) for outcome in outcomes])
            )
            / num_samples
            for status in get_args(Status)
        },
    }


def _pass_at(outcomes: Sequence[Outcome], k: int) -> np.ndarray:
    passed = [each.passed for each in outcomes if len(each.passed) >= k]
    return pass_at_k(
        np.array([sum(each) for each in passed], int),
        num_samples=np.array([len(each) for each in passed], int),
        k=k,
    )


def _majority_at(outcomes: Sequence[Outcome], k: int) -> list[float]:
    return [
        majority_at_k(outcome.judged_votes or [], outcome.passed, k=k)
        for outcome in outcomes
        if len(outcome.passed) >= k
    ]


def table(sets: Mapping[str, Mapping[str, Any]]) -> str:
    """Sets as columns, figures as rows, each with its standard error."""
    first = next(iter(sets.values()))
    rows: list[tuple[str, list[str]]] = [
        ("", list(sets)),
        ("prompts", [str(each["prompts"]) for each in sets.values()]),
        *_unjudged_rows(sets),
        (
            f"mean@{first['samples_per_prompt']}",
            [_text(each["mean"]) for each in sets.values()],
        ),
    ]
    for name, field in {"pass": "pass_at", "maj": "majority_at"}.items():
        rows += [
            (
                f"{name}@{k}",
                [_text((each[field] or {}).get(k)) for each in sets.values()],
            )
            for k in first["pass_at"]
        ]
    rows += [
        (
            "completion tokens",
            [_text(each["completion_tokens"], digits=1) for each in sets.values()],
        ),
        (
            "10, 50, 90, 99 %",
            [
                " ".join(
                    f"{value:.0f}"
                    for value in each["completion_tokens"]["quantiles"].values()
                )
                for each in sets.values()
            ],
        ),
        ("cut off", [_text(each["cut_off"]) for each in sets.values()]),
        ("interrupted", [_text(each["interrupted"]) for each in sets.values()]),
    ]
    for status in get_args(Status):
        shares = [each["verdicts"][status] for each in sets.values()]
        if any(shares) or status == "correct":
            rows.append(
                (status.replace("_", " "), [f"{share:.3f}" for share in shares])
            )
    width = max(_WIDTH, *(len(name) + 2 for name in sets))
    return "".join(
        f"{name:<{_NAME_WIDTH}}{''.join(f'{cell:>{width}}' for cell in cells)}\n"
        for name, cells in rows
    )


def _unjudged_rows(sets: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """How many samples no pass rate counts, where there are any."""
    counts = [each["unjudged"]["samples"] for each in sets.values()]
    return (
        [("unjudged samples", [str(count) for count in counts])] if any(counts) else []
    )


def _mean(values: Any) -> dict[str, Any]:
    values = np.asarray(values, np.float64)
    if not len(values):
        return {"value": None, "se": None}
    error = standard_error(values)
    return {
        "value": float(values.mean()),
        "se": None if math.isnan(error) else error,
    }


def _text(figure: Mapping[str, Any] | None, *, digits: int = 3) -> str:
    if figure is None or figure["value"] is None:
        return "-"
    error = "" if figure["se"] is None else f" ± {figure['se']:.{digits}f}"
    return f"{figure['value']:.{digits}f}{error}"
