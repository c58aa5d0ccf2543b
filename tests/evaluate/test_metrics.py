"""Figures against subsets that are written out, and errors against repetitions."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from scalerl_jax.evaluate.metrics import counts_up_to, majority_at_k, pass_at_k
from scalerl_jax.generation.evaluation import standard_error


@pytest.mark.parametrize(
    "correct, samples, k, expected",
    [
        (1, 4, 1, 1 / 4),
        (1, 4, 2, 1 / 2),
        (2, 5, 2, 1 - 3 / 10),  # 1 - C(3, 2) / C(5, 2)
        (2, 16, 8, 1 - 28 / 120),  # 1 - C(14, 8) / C(16, 8) = 1 - (8 * 7) / (16 * 15)
        (0, 16, 16, 0.0),
        (1, 16, 16, 1.0),
    ],
)
def test_pass_at_k_of_hand_worked_cases(correct, samples, k, expected):
    found = pass_at_k(np.array([correct]), num_samples=samples, k=k)
    assert found == pytest.approx([expected], abs=1e-12)


@pytest.mark.parametrize("samples", [1, 2, 5, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(samples):
    for k in range(1, samples + 1):
        expected = [
            np.mean([any(each) for each in itertools.combinations(outcome, k)])
            for outcome in ([True] * c + [False] * (samples - c) for c in range(k + 1))
        ]
        found = pass_at_k(np.arange(k + 1), num_samples=samples, k=k)
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow():
    correct = np.array([0, 1, 3, 999, 1000])
    for k in (1, 7, 500, 1000):
        exact = [
            1 - Fraction(math.comb(1000 - c, k), math.comb(1000, k))
            for c in correct.tolist()
        ]
        found = pass_at_k(correct, num_samples=1000, k=k)
        np.testing.assert_allclose(found, [float(each) for each in exact], rtol=1e-12)


def majority_of_subsets(votes, correct, k):
    """Return maj@k by writing down every subset, ties shared, in exact fractions."""
    total = Fraction(0)
    subsets = list(itertools.combinations(range(len(votes)), k))
    for subset in subsets:
        counts = Counter(votes[at] for at in subset if votes[at] is not None)
        leaders = [vote for vote in counts if counts[vote] == max(counts.values())]
        for vote in leaders:
            same = [bool(correct[at]) for at, each in enumerate(votes) if each == vote]
            total += Fraction(sum(same), len(same)) / len(leaders)
    return float(total / len(subsets))


@pytest.mark.parametrize(
    "votes, correct, k, expected",
    [
        ("aab", "110", 1, 2 / 3),
        ("aab", "110", 2, 2 / 3),  # {a, a}, and two ties at one half
        ("aab", "110", 3, 1.0),
        ("abb", "100", 3, 0.0),
        ("abc", "100", 3, 1 / 3),
        ("-a", "01", 1, 1 / 2),  # no vote, no majority
        ("-a", "01", 2, 1.0),
        ("--", "00", 2, 0.0),
        ("aa", "10", 2, 1 / 2),  # one of two equal answers was not judged
    ],
)
def test_majority_of_hand_worked_cases(votes, correct, k, expected):
    votes = [None if vote == "-" else vote for vote in votes]
    passed = [letter == "1" for letter in correct]
    assert majority_at_k(votes, passed, k=k) == pytest.approx(expected)
    assert majority_of_subsets(votes, passed, k) == pytest.approx(expected)


def test_majority_is_the_mean_over_all_subsets():
    rng = np.random.default_rng(0)
    for _ in range(40):
        samples = int(rng.integers(1, 9))
        letters = rng.choice(["a", "b", "c", "d", ""], samples).tolist()
        votes = [letter or None for letter in letters]
        right = set(rng.choice(["a", "b", "c"], 2).tolist())
        correct = [vote in right for vote in votes]
        for k in range(1, samples + 1):
            expected = majority_of_subsets(votes, correct, k)
            assert majority_at_k(votes, correct, k=k) == pytest.approx(expected)


def test_majority_of_many_samples():
    votes = ["a"] * 600 + ["b"] * 400
    correct = [vote == "a" for vote in votes]
    assert majority_at_k(votes, correct, k=1) == pytest.approx(0.6)
    # Of 101 of them, a has more than 50: a hypergeometric tail, in exact integers.
    ways = sum(math.comb(600, v) * math.comb(400, 101 - v) for v in range(51, 102))
    expected = float(Fraction(ways, math.comb(1000, 101)))
    assert majority_at_k(votes, correct, k=101) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2, 5, 64, 512, 1000])
def test_majority_among_hundreds_of_different_answers(k):
    votes = ["right"] * 500 + [f"wrong {i}" for i in range(500)]
    found = majority_at_k(votes, [vote == "right" for vote in votes], k=k)
    # Alone in the lead with two votes or more; with one, all k answers share it.
    none, one = (math.comb(500, v) * math.comb(500, k - v) for v in (0, 1))
    ways = math.comb(1000, k)
    assert found == pytest.approx(
        float(1 - Fraction(none + one, ways)) + float(Fraction(one, ways * k))
    )


def simulated(rng, prompts, samples):
    """Correct samples of prompts whose own pass rates differ."""
    return rng.binomial(samples, rng.beta(0.6, 0.9, prompts))


@pytest.mark.parametrize("k", [1, 4])
def test_standard_error_is_that_of_a_bootstrap_over_prompts(k):
    rng = np.random.default_rng(1)
    values = pass_at_k(simulated(rng, 300, 8), num_samples=8, k=k)
    drawn = rng.integers(0, 300, (4000, 300))
    bootstrap = values[drawn].mean(axis=1).std()
    assert standard_error(values) == pytest.approx(bootstrap, rel=0.05)


def test_standard_error_is_the_spread_of_whole_repetitions():
    rng = np.random.default_rng(2)
    repeated = [
        pass_at_k(simulated(rng, 100, 8), num_samples=8, k=2) for _ in range(2000)
    ]
    spread = np.std([values.mean() for values in repeated])
    claimed = np.mean([standard_error(values) for values in repeated])
    assert claimed == pytest.approx(spread, rel=0.06)


def test_one_prompt_has_no_standard_error():
    assert math.isnan(standard_error(np.array([0.5])))


def test_counts_end_at_the_number_of_samples():
    assert counts_up_to(1) == [1]
    assert counts_up_to(12) == [1, 2, 4, 8, 12]
    assert counts_up_to(16) == [1, 2, 4, 8, 16]
