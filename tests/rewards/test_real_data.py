"""Samples of real data; `make bench-rewards` judges the whole sets."""

import importlib.util
from pathlib import Path

import pytest
from small_sandbox import sandboxed

from scalerl_jax.rewards import code, maths

PATH = Path(__file__).parents[2] / "benchmarks/rewards.py"
SPEC = importlib.util.spec_from_file_location("bench_rewards", PATH)
bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)
ANSWERS = bench.math500_answers()


def judge_maths(item):
    return maths.judge("any", item.answer, item.reference, answer_from="boxed").status


def judge_code(item):
    limits = dict(cpu_s=20, wall_s=30.0, memory_mib=512)
    return code.judge("any", item.answer, item.reference, **limits).status


@pytest.mark.parametrize("writing", bench.rewritings("1"))
def test_answers_of_math500_equal_themselves_rewritten(writing):
    sample = ANSWERS[::8]
    items = [
        bench.boxed(each, bench.rewritings(each)[writing], each) for each in sample
    ]
    refused = [item.name for item in items if judge_maths(item) != "correct"]
    assert len(refused) <= 0.01 * len(sample), refused


def test_answers_of_math500_differ_from_the_next_one_s():
    pairs = [(a, b) for a, b in zip(ANSWERS, ANSWERS[1:], strict=False) if a != b][::5]
    accepted = [
        pair for pair in pairs if judge_maths(bench.boxed("", *pair)) != "wrong"
    ]
    assert len(accepted) <= 0.01 * len(pairs), accepted


@sandboxed
@pytest.mark.parametrize("place", range(0, 164, 20))
def test_a_solution_of_human_eval_passes_and_its_mutant_fails(place):
    item = list(bench.human_eval().values())[place]
    assert judge_code(item) == "correct"
    assert bench.mutated(item).answer != item.answer
    assert judge_code(bench.mutated(item)) == "wrong"
