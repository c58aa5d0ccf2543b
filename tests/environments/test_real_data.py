"""Samples of real data; `make bench-rewards` judges the whole sets."""

import importlib.util
import sys
from pathlib import Path

import pytest
from small_sandbox import sandboxed

from scalerl_jax.environments.judges import code, maths

PATH = Path(__file__).parents[2] / "benchmarks/rewards.py"
sys.path.insert(0, str(PATH.parent))  # of what it imports
SPEC = importlib.util.spec_from_file_location("bench_rewards", PATH)
bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)
ANSWERS = bench.math500_answers()


def judge_maths(item):
    return maths.judge("any", item.answer, item.reference, answer_from="boxed").status


def judge_code(item):
    limits = dict(cpu_s=20, wall_s=30.0, memory_mib=512)
    return code.judge("any", item.answer, item.reference, **limits).status


def test_answers_of_math500_equal_themselves_rewritten():
    items = bench.pairs_of(ANSWERS[::8], bench.REWRITINGS)
    refused = [item.name for item in items if judge_maths(item) != "correct"]
    assert len(items) > 1000
    assert len(refused) <= 0.005 * len(items), refused


def test_answers_of_math500_that_are_changed_are_wrong():
    items = bench.pairs_of(ANSWERS[::8], bench.PERTURBATIONS)
    accepted = [item.name for item in items if judge_maths(item) == "correct"]
    assert len(items) > 500
    assert len(accepted) <= 0.001 * len(items), accepted


def test_answers_of_other_problems_are_wrong_unless_they_are_equal():
    items = bench.other_answers(list(dict.fromkeys(ANSWERS))[::4])
    accepted = [item for item in items if judge_maths(item) == "correct"]
    assert len(items) > 150
    assert all(map(bench.is_confirmed, accepted)), accepted


@sandboxed
@pytest.mark.parametrize("place", range(0, 164, 20))
def test_a_solution_of_human_eval_passes_and_its_mutant_fails(place):
    item = list(bench.human_eval().values())[place]
    assert judge_code(item) == "correct"
    assert bench.mutated(item).answer != item.answer
    assert judge_code(bench.mutated(item)) == "wrong"
