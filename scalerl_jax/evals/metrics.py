"""Figures of prompts that were sampled several times: NumPy alone.

Letters: N prompts, n samples of each, c of them correct, k <= n samples that count.
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

MAX_SAMPLES = 1000  # of a prompt; binomial coefficients of more are no float64


def pass_at_k(
    num_correct: Int[np.ndarray, " N"],
    *,
    num_samples: int | Int[np.ndarray, " N"],
    k: int,
) -> Float[np.ndarray, " N"]:
    """Chance that one of k samples at least is correct, without bias.

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
    """Chance that the most frequent answer of k of the n samples is correct.

    The mean over all C(n, k) subsets, which are counted and not drawn: no seed, no
    error of its own.  None casts no vote, and a subset without a vote is wrong.  Of m
    answers that share the lead each is the majority with 1 / m.  Equal votes with
    different verdicts (one may have timed out) are right by the share of the correct.
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


@functools.lru_cache(maxsize=4096)  # prompts share few patterns of counts
def _lead(count: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """Chance that an answer with `count` votes leads among k samples, ties shared.

        sum_v C(count, v) sum_t [x^(k - v) y^t] P_v(x, y) / (1 + t) / C(n, k)

        P_v(x, y) = (1 + x)^silent prod_b (sum_{u < v} C(b, u) x^u + C(b, v) x^v y)

    v are its votes in a subset, t the other answers with as many, b over `others`.
    """
    shares = 1.0 / np.arange(1, len(others) + 2)
    ways = 0.0
    for votes in range(1, min(count, k) + 1):
        left = k - votes
        # [x, y]: subsets of the others with so many samples and so many ties
        subsets = np.zeros((left + 1, len(others) + 1))
        subsets[: silent + 1, 0] = [
            math.comb(silent, taken) for taken in range(min(silent, left) + 1)
        ]
        for other in others:
            before, subsets = subsets, np.zeros_like(subsets)
            for taken in range(min(other, votes, left) + 1):
                term = math.comb(other, taken) * before[: left + 1 - taken]
                if taken < votes:
                    subsets[taken:] += term
                else:
                    subsets[taken:, 1:] += term[:, :-1]
        ways += math.comb(count, votes) * float(subsets[left] @ shares)
    return ways / math.comb(count + sum(others) + silent, k)


def standard_error(values: Float[np.ndarray, " N"]) -> float:
    """Of the mean over prompts, each with one value; NaN for a single prompt.

        std(values, ddof = 1) / sqrt(N)

    It holds both what sets prompts apart and what is left of the chance of sampling:
    prompts are taken as drawn from many, their samples as drawn anew.
    """
    if len(values) < 2:
        return math.nan
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def counts_up_to(num_samples: int) -> list[int]:
    """The k of a table: 1, 2, 4, ... and the number of samples itself."""
    powers = [2**power for power in range(num_samples.bit_length())]
    return sorted({*powers, num_samples})
