"""Figures of outcomes that are worked out by hand, and their table."""

import dataclasses

import pytest

from scalerl_jax.evaluate.metrics import PromptOutcome, figures, table

EASY = PromptOutcome(
    statuses=["correct", "correct"],
    passed=[True, True],
    judged=[True, True],
    votes=["4", "4"],
    tokens=[10, 20],
    cut_off=[False, False],
    interrupted=[False, True],
)
HARD = PromptOutcome(
    statuses=["wrong", "no_answer"],
    passed=[False, False],
    judged=[True, True],
    votes=["5", None],
    tokens=[30, 40],
    cut_off=[False, True],
    interrupted=[False, False],
)
PROGRAM = PromptOutcome(
    statuses=["correct", "unparsable"],
    passed=[True, False],
    judged=[True, True],
    votes=None,
    tokens=[10, 10],
    cut_off=[False, False],
    interrupted=[False, False],
)


def test_figures_of_two_prompts():
    found = figures([EASY, HARD])
    # Pass rates 1 and 0: mean 1/2, standard deviation 1/sqrt(2), error of two 1/2.
    assert found["mean"] == {"value": 0.5, "se": pytest.approx(0.5)}
    assert found["pass_at"]["2"] == {"value": 0.5, "se": pytest.approx(0.5)}
    assert found["majority_at"]["2"]["value"] == 0.5
    # Mean lengths 15 and 35: standard deviation 20 / sqrt(2).
    assert found["completion_tokens"]["value"] == 25.0
    assert found["completion_tokens"]["se"] == pytest.approx(10.0)
    assert found["completion_tokens"]["quantiles"]["0.5"] == 25.0
    assert found["completion_tokens"]["total"] == 100
    assert (found["cut_off"]["value"], found["interrupted"]["value"]) == (0.25, 0.25)
    shares = {"correct": 0.5, "wrong": 0.25, "no_answer": 0.25, "unparsable": 0.0}
    shares |= {"too_costly": 0.0, "verifier_timeout": 0.0, "verifier_error": 0.0}
    shares |= {"bad_reward": 0.0, "bad_observation": 0.0, "no_end": 0.0}
    assert found["verdicts"] == shares


def test_unjudged_samples_are_left_out():
    half = PromptOutcome(
        statuses=["correct", "verifier_timeout"],
        passed=[True, False],
        judged=[True, False],
        votes=["4", "9"],
        tokens=[10, 20],
        cut_off=[False, False],
        interrupted=[False, False],
    )
    lost = dataclasses.replace(
        half, statuses=["verifier_error"] * 2, judged=[False, False]
    )
    found = figures([HARD, half, lost])
    assert found["unjudged"] == {"samples": 3, "prompts": 1}
    # Pass rates 0 of 2 and 1 of 1; two judged samples has the first alone.
    assert found["mean"] == {"value": 0.5, "se": pytest.approx(0.5)}
    assert found["pass_at"]["1"]["value"] == 0.5
    assert found["pass_at"]["2"] == {"value": 0.0, "se": None}
    assert found["majority_at"]["1"]["value"] == 0.5
    assert found["majority_at"]["2"] == {"value": 0.0, "se": None}
    assert found["completion_tokens"]["total"] == 130
    assert found["verdicts"]["verifier_error"] == pytest.approx(1 / 3)
    lines = table({"gsm8k": found, "other": figures([lost])}).splitlines()
    cells = {line[:24].strip(): line[24:].split() for line in lines}
    assert cells["unjudged samples"] == ["3", "2"] and cells["mean@2"][-1] == "-"


def test_programs_have_no_majority():
    found = figures([PROGRAM])
    assert found["majority_at"] is None
    assert found["mean"] == {"value": 0.5, "se": None}
    assert figures([EASY, PROGRAM])["majority_at"] is None
    lines = table({"humaneval": found}).splitlines()
    cells = {line[:24].strip(): line[24:].split() for line in lines}
    assert cells["maj@2"] == ["-"] and cells["pass@2"] == ["1.000"]
    assert cells["unparsable"] == ["0.500"] and "wrong" not in cells
