"""Figures of prompts that were sampled several times, with standard errors, as a table.

Letters: N prompts, n samples of each, c of them correct, k <= n samples that count.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

import numpy as np
from jaxtyping import Float, Int

from scalerl_jax.environments.verdict import Status
from scalerl_jax.generation.evaluation import JudgedPrompt, standard_error

T = TypeVar("T")
_QUANTILES = (0.1, 0.5, 0.9, 0.99)
_NAME_WIDTH, _WIDTH = 24, 16  # letters of the table's columns
MAX_SAMPLES = 1000  # of a prompt; binomial coefficients of more overflow float64


def pass_at_k(
    num_correct: Int[np.ndarray, " N"],
    *,
    num_samples: int | Int[np.ndarray, " N"],
    k: int,
) -> Float[np.ndarray, " N"]:
    """Return the unbiased estimate of the chance that any of k samples is correct.

        pass@k = 1 - C(n - c, k) / C(n, k) = 1 - prod_{i = n - c + 1}^{n} (1 - k / i)

    Chen et al., https://arxiv.org/abs/2107.03374, equation 1; the product is exact to
    rounding where the binomial coefficients would overflow.
    """
    correct = np.asarray(num_correct)
    samples = np.broadcast_to(num_samples, correct.shape)[:, None]
    assert k >= 1 and (k <= samples).all(), (k, num_samples)
    places = np.arange(1, samples.max(initial=0) + 1)
    factors = np.maximum(1.0 - k / places, 0.0)
    counted = (places > samples - correct[:, None]) & (places <= samples)
    return 1.0 - np.where(counted, factors, 1.0).prod(axis=1)


def majority_at_k(
    votes: Sequence[str | None], correct: Sequence[bool], *, k: int
) -> float:
    """Return the chance that the most frequent of k of the n answers is correct.

    It is the mean over all C(n, k) subsets, which are counted, not drawn: there is no
    seed and no sampling error.  None casts no vote, and a subset without a vote is
    wrong.  If m answers share the lead, each is the majority with chance 1 / m.  Equal
    votes with different verdicts (one may have timed out) count by the correct share.
    """
    assert 1 <= k <= len(votes) <= MAX_SAMPLES, (k, len(votes))
    counts = Counter(vote for vote in votes if vote is not None)
    right = Counter(vote for vote, passed in zip(votes, correct, strict=True) if passed)
    silent = len(votes) - counts.total()
    return math.fsum(
        passed
        / counts[vote]
        * _lead(
            counts[vote],
            tuple(sorted((counts - Counter({vote: counts[vote]})).values())),
            silent,
            k,
        )
        for vote, passed in right.items()
        if vote is not None
    )


@functools.lru_cache(maxsize=MAX_SAMPLES + 1)
def _binomials(total: int) -> Float[np.ndarray, " n"]:
    """Return C(total, 0), ..., C(total, total)."""
    return np.array([math.comb(total, taken) for taken in range(total + 1)], float)


@functools.lru_cache(maxsize=4096)  # prompts share few patterns of counts
def _lead(count: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """Return the chance that an answer with `count` votes leads among k, ties shared.

        sum_v C(count, v) sum_t [x^(k - v) y^t] P_v(x, y) / (1 + t) / C(n, k)

        P_v(x, y) = (1 + x)^silent prod_b (sum_{u < v} C(b, u) x^u + C(b, v) x^v y)

    v are its votes in a subset, t the other answers with as many, b over `others`.  The
    answers with b < v, which can neither tie nor lead, are one factor: (1 + x)^b each.
    """
    shares = 1.0 / np.arange(1, len(others) + 2)
    ways = 0.0
    for votes in range(1, min(count, k) + 1):
        left = k - votes
        rivals = [other for other in others if other >= votes]
        weak = silent + sum(others) - sum(rivals)  # can neither tie nor lead
        # [x, y]: number of subsets of the others with x samples and y ties
        subsets = np.zeros((left + 1, min(len(rivals), left // votes) + 1))
        subsets[: weak + 1, 0] = _binomials(weak)[: left + 1]
        for other in rivals:
            before, subsets = subsets, np.zeros_like(subsets)
            for taken in range(min(other, votes, left) + 1):
                term = _binomials(other)[taken] * before[: left + 1 - taken]
                if taken < votes:
                    subsets[taken:] += term
                else:
                    subsets[taken:, 1:] += term[:, :-1]
        shared = float(subsets[left] @ shares[: subsets.shape[1]])
        ways += math.comb(count, votes) * shared
    return ways / math.comb(count + sum(others) + silent, k)


def counts_up_to(num_samples: int) -> list[int]:
    """Return the k of a table: 1, 2, 4, ... and the number of samples itself."""
    powers = [2**power for power in range(num_samples.bit_length())]
    return sorted({*powers, num_samples})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOutcome:
    """A judged prompt as the figures need it; each list has a value per sample."""

    statuses: Sequence[Status]
    passed: Sequence[bool]
    judged: Sequence[bool]  # False: only figures of lengths and verdicts count it
    votes: Sequence[str | None] | None  # None: its answers cannot be compared
    tokens: Sequence[int]
    cut_off: Sequence[bool]
    interrupted: Sequence[bool]

    @classmethod
    def of(
        cls, judged: JudgedPrompt, votes: Sequence[str | None] | None
    ) -> "PromptOutcome":
        """Make the outcome of a judged prompt, with the votes of its answers."""
        return cls(
            statuses=judged.statuses,
            passed=judged.passed,
            judged=judged.judged,
            votes=votes,
            tokens=[len(each.tokens) for each in judged.completions],
            cut_off=[each.cut_off for each in judged.completions],
            interrupted=[each.interrupted for each in judged.completions],
        )

    @property
    def judged_passed(self) -> list[bool]:
        """Return for each judged sample whether it has passed."""
        return self._judged(self.passed)

    @property
    def judged_votes(self) -> list[str | None] | None:
        """Return the vote of each judged sample."""
        return None if self.votes is None else self._judged(self.votes)

    def _judged(self, values: Sequence[T]) -> list[T]:
        return list(itertools.compress(values, self.judged))


def figures(outcomes: Sequence[PromptOutcome]) -> dict[str, Any]:
    """Return the figures of a set as JSON values; "se" is null for a single prompt.

    Every value (mean@n, each pass@k and maj@k, the shares and lengths) is the mean over
    prompts of each prompt's own mean, with the standard error over prompts
    (`standard_error`).  maj@k is null where answers cannot be compared
    (`results.can_vote`).

    Unjudged samples are left out of mean@n, pass@k and maj@k.  These are means over the
    prompts that have a judged sample, or k of them; null if no prompt has.
    """
    num_samples = len(outcomes[0].statuses)
    counts = counts_up_to(num_samples)
    unjudged = num_samples - np.array(
        [len(outcome.judged_passed) for outcome in outcomes]
    )
    lengths = np.array([outcome.tokens for outcome in outcomes])
    quantiles = np.quantile(lengths, _QUANTILES)
    return {
        "prompts": len(outcomes),
        "samples_per_prompt": num_samples,
        "unjudged": {
            "samples": int(unjudged.sum()),
            "prompts": int((unjudged == num_samples).sum()),  # without a judged one
        },
        "mean": _mean(
            [np.mean(each.judged_passed) for each in outcomes if each.judged_passed]
        ),
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


def _pass_at(outcomes: Sequence[PromptOutcome], k: int) -> np.ndarray:
    passed = [each.judged_passed for each in outcomes if len(each.judged_passed) >= k]
    return pass_at_k(
        np.array([sum(each) for each in passed], int),
        num_samples=np.array([len(each) for each in passed], int),
        k=k,
    )


def _majority_at(outcomes: Sequence[PromptOutcome], k: int) -> list[float]:
    return [
        majority_at_k(outcome.judged_votes or [], outcome.judged_passed, k=k)
        for outcome in outcomes
        if len(outcome.judged_passed) >= k
    ]


def table(sets: Mapping[str, Mapping[str, Any]]) -> str:
    """Return sets as columns, figures as rows, each with its standard error."""
    columns = list(sets.values())
    rows = [("", list(sets))]

    def add(name: str, cell: Callable[[Mapping[str, Any]], str]) -> None:
        rows.append((name, [cell(each) for each in columns]))

    add("prompts", lambda each: str(each["prompts"]))
    if any(each["unjudged"]["samples"] for each in columns):
        add("unjudged samples", lambda each: str(each["unjudged"]["samples"]))
    add(f"mean@{columns[0]['samples_per_prompt']}", lambda each: _text(each["mean"]))
    for name, field in {"pass": "pass_at", "maj": "majority_at"}.items():
        for k in columns[0]["pass_at"]:
            add(f"{name}@{k}", lambda each, k=k, f=field: _text((each[f] or {}).get(k)))
    add("completion tokens", lambda each: _text(each["completion_tokens"], digits=1))
    quantiles = [each["completion_tokens"]["quantiles"].values() for each in columns]
    rows.append(
        ("10, 50, 90, 99 %", [" ".join(f"{q:.0f}" for q in each) for each in quantiles])
    )
    for field in ("cut_off", "interrupted"):
        add(field.replace("_", " "), lambda each, field=field: _text(each[field]))
    for status in get_args(Status):
        shares = [each["verdicts"][status] for each in columns]
        if any(shares) or status == "correct":
            rows.append((status.replace("_", " "), [f"{each:.3f}" for each in shares]))
    width = max(_WIDTH, *(len(name) + 2 for name in sets))
    return "".join(
        f"{name:<{_NAME_WIDTH}}{''.join(f'{cell:>{width}}' for cell in cells)}\n"
        for name, cells in rows
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
