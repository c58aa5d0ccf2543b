"""The verifiers that a prompt may name, as a run makes them."""

import contextlib
import dataclasses
import os
import typing

import numpy as np
import pytest
from small_sandbox import WHY_NOT

from scalerl_jax.config import Config, MathAnswer, RewardConfig
from scalerl_jax.data import tasks
from scalerl_jax.environments.judges import maths
from scalerl_jax.environments.run_verifiers import num_processes
from scalerl_jax.environments.sandbox import SandboxError
from scalerl_jax.types import Prompt
from scalerl_jax.wiring.prompts import check_verifiers, make_verifier

CONFIG = dataclasses.replace(
    Config(),
    reward=RewardConfig(
        timeout_s=30.0, num_workers=2, math_answer="boxed_else_last_number"
    ),
)


def prompt(reference):
    return Prompt(
        prompt_id=0,
        epoch=0,
        task="any",
        text="?",
        tokens=np.array([1], np.int32),
        reference=reference,
    )


def test_a_prompt_is_judged_by_the_verifier_that_it_names():
    (question,) = tasks.make_questions("chain_sum", count=1, seed=0, exclude=set())
    answer = question.reference["answer"]
    tests = {"kind": "stdin", "inputs": [""], "outputs": ["7"]}
    groups = {
        "task": (question.reference, [answer, "no"]),
        "reasoning_gym": (
            {**question.reference, "verifier": "reasoning_gym"},
            [answer, "no"],
        ),
        "math": ({"verifier": "math", "answer": "7"}, ["it is 7", "it is 8"]),
        "code": (
            {"verifier": "code", "tests": tests},
            ["```\nprint(7)\n```", "```\nprint(8)\n```"],
        ),
    }
    if WHY_NOT:
        del groups["code"]  # refused, as tests/environments/test_code.py shows
    found = {}
    with contextlib.ExitStack() as opened:
        pool = make_verifier(CONFIG, opened, own=None)
        for key, (reference, answers) in groups.items():
            pool.submit(key, "chain_sum", answers, reference)
        while pool.pending:
            pool.wait(60.0)
            found |= {each.key: each.statuses for each in pool.poll()}
    assert found == {key: ["correct", "wrong"] for key in groups}


def test_the_setting_takes_what_the_verifier_takes():
    assert typing.get_args(MathAnswer) == typing.get_args(maths.AnswerFrom)


def test_a_run_does_not_start_with_a_verifier_that_is_not_there():
    check_verifiers(CONFIG, [prompt({"answer": "7"}), prompt({"verifier": "math"})])
    with pytest.raises(ValueError, match=r"'maths'; choose from \['code', "):
        check_verifiers(CONFIG, [prompt({"verifier": "maths"})])


def test_a_run_with_programs_does_not_start_without_a_sandbox(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    check_verifiers(CONFIG, [prompt({"verifier": "math"})])
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        check_verifiers(CONFIG, [prompt({"verifier": "code"})])


def test_a_missing_directory_of_packages_is_named():
    reward = dataclasses.replace(CONFIG.reward, code_packages="/nonexistent")
    config = dataclasses.replace(CONFIG, reward=reward)
    check_verifiers(config, [prompt({"verifier": "math"})])
    with pytest.raises(ValueError, match="reward.code_packages = '/nonexistent'"):
        check_verifiers(config, [prompt({"verifier": "code"})])


@pytest.mark.parametrize(
    "cores, asked, expected", [(1, 0, 1), (2, 0, 1), (8, 0, 6), (208, 0, 32), (8, 3, 3)]
)
def test_verifiers_follow_the_machine(monkeypatch, cores, asked, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert num_processes(asked) == expected
