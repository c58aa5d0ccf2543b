"""An evaluation of the base checkpoint, judged again from what it wrote down."""

import dataclasses
import math
import statistics
import textwrap

import jax
import pytest
import small_run

from scalerl_jax.data import tasks
from scalerl_jax.environments.pool import VerifierPool
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.pool import PagePool
from scalerl_jax.wiring.sampling import make_sampler


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = small_run.make_config(
        {
            "eval.num_prompts": 20,
            "eval.samples_per_prompt": 1,
            "eval.logged_rollouts": 99,
        }
    )
    with small_run.built(config, tmp_path_factory.mktemp("run")) as run:
        yield run


@pytest.fixture(scope="module")
def params(run):
    return run.learner.publish(run.state).params


@pytest.fixture(scope="module")
def evaluation(run, params):
    return run.generators.evaluator(params, policy_version=7)


def judge(evaluate, row):
    """The verdict on a written rollout, without the verifier's process."""
    (prompt,) = [each for each in evaluate.prompts if each.text == row["prompt"]]
    assert prompt.reference["answer"] == row["reference"]
    _, found, answer = row["completion"].removesuffix("<eos>").rpartition("</think>")
    if not found:
        return "no_answer"
    score = tasks.score(prompt.task, answer.strip(), prompt.reference)
    return "correct" if score >= 1.0 else "wrong"


def test_figures_follow_from_the_rollouts(run, evaluation):
    rows = evaluation.rollouts
    assert len(rows) == len({row["prompt"] for row in rows}) == 20
    assert {row["policy_version"] for row in rows} == {7}
    assert [row["status"] for row in rows] == [
        judge(run.generators.evaluator, row) for row in rows
    ]
    passed = [float(row["status"] == "correct") for row in rows]
    assert 0.0 < evaluation.pass_rate < 1.0  # or the rest says little
    assert evaluation.pass_rate == pytest.approx(statistics.mean(passed))
    error = statistics.stdev(passed) / 20**0.5
    assert evaluation.pass_rate_se == pytest.approx(error)
    for task, rate in evaluation.pass_rate_by_task.items():
        of_task = [
            p for row, p in zip(rows, passed, strict=True) if row["task"] == task
        ]
        assert rate == pytest.approx(statistics.mean(of_task))
        assert len(of_task) in (6, 7)
    lengths = [row["tokens"] for row in rows]
    assert evaluation.mean_completion_tokens == pytest.approx(statistics.mean(lengths))
    for name in ("cut_off", "interrupted"):
        share = statistics.mean(float(row[name]) for row in rows)
        assert getattr(evaluation, f"{name}_share") == pytest.approx(share)
    assert (evaluation.num_prompts, evaluation.samples_per_prompt) == (20, 1)


def test_rollouts_depend_on_no_slot(run, params, evaluation):
    (wide,) = run.generators.evaluator.make_sampler.args
    settings = dataclasses.replace(wide.engine.settings, slots=7)
    pool = PagePool(Engine(settings, mesh=wide.engine.mesh))
    narrow = dataclasses.replace(
        run.generators.evaluator, make_sampler=lambda: make_sampler(pool)
    )
    assert narrow(params, policy_version=7).rollouts == evaluation.rollouts


def test_other_params_are_evaluated_as_they_are(run, params, evaluation):
    worse = jax.tree.map(lambda leaf: leaf * 0.5, params)
    assert (
        run.generators.evaluator(worse, policy_version=7).rollouts
        != evaluation.rollouts
    )
    again = run.generators.evaluator(params, policy_version=7)
    assert again == evaluation


def test_rollouts_to_read_are_spread_over_the_tasks(run, params, evaluation):
    few = dataclasses.replace(run.generators.evaluator, logged_rollouts=3)
    rows = few(params, policy_version=7).rollouts
    assert rows == tuple(evaluation.rollouts[place] for place in (0, 9, 19))
    assert len({row["task"] for row in rows}) == 3
    none = dataclasses.replace(run.generators.evaluator, logged_rollouts=0)
    assert none(params, policy_version=7).rollouts == ()


def test_one_prompt_has_no_spread(run, params):
    one = dataclasses.replace(
        run.generators.evaluator,
        prompts=run.generators.evaluator.prompts[:1],
    )
    result = one(params, policy_version=0)
    assert result.num_prompts == 1 and math.isnan(result.pass_rate_se)


HANGING = """
    import time

    def score(task, answer, reference):
        time.sleep(600)
"""


def test_a_verifier_that_hangs_is_said_so(
    run, params, evaluation, tmp_path, monkeypatch
):
    (tmp_path / "hanging_evaluation.py").write_text(textwrap.dedent(HANGING))
    monkeypatch.syspath_prepend(tmp_path)
    answered = [
        prompt
        for prompt, row in zip(
            run.generators.evaluator.prompts, evaluation.rollouts, strict=True
        )
        if row["status"] != "no_answer"
    ]
    pool = VerifierPool(score="hanging_evaluation:score", timeout_s=0.2)
    try:
        hanging = dataclasses.replace(
            run.generators.evaluator,
            prompts=answered[:2],
            verifier=pool,
        )
        result = hanging(params, policy_version=7)
    finally:
        pool.close()
    assert [row["status"] for row in result.rollouts] == ["verifier_timeout"] * 2
    assert math.isnan(result.pass_rate) and result.pass_rate_by_task == {}
    assert (result.unjudged_share, result.unjudged_prompts) == (1.0, 2)
    assert result.num_prompts == 0 and math.isnan(result.pass_rate_se)
    assert set(result.details) == {"no verdict within reward.timeout_s = 0.2"}


AWAY = """
    from scalerl_jax.data import tasks

    def score(task, answer, reference):
        if task == "chain_sum":
            raise OSError("the judge is away")
        return tasks.score(task, answer, reference)
"""


@pytest.mark.parametrize("wrong", [False, True])
def test_what_is_not_judged_is_in_no_pass_rate(
    run, params, evaluation, tmp_path, monkeypatch, wrong
):
    (tmp_path / "away_evaluation.py").write_text(textwrap.dedent(AWAY))
    monkeypatch.syspath_prepend(tmp_path)
    pool = VerifierPool(score="away_evaluation:score", timeout_s=60.0)
    try:
        evaluator = run.generators.evaluator
        judging = dataclasses.replace(evaluator.judging, unjudged_is_wrong=wrong)
        away = dataclasses.replace(evaluator, verifier=pool, judging=judging)
        result = away(params, policy_version=7)
    finally:
        pool.close()
    # No answer at all needs no judge.
    statuses = [row["status"] for row in evaluation.rollouts]
    failed = [
        row["task"] == "chain_sum" and status != "no_answer"
        for row, status in zip(evaluation.rollouts, statuses, strict=True)
    ]
    passed = [
        float(status == "correct" and not gone)
        for status, gone in zip(statuses, failed, strict=True)
    ]
    left = [
        rate for rate, gone in zip(passed, failed, strict=True) if wrong or not gone
    ]
    assert 0 < sum(failed) < 20
    assert result.pass_rate == pytest.approx(statistics.mean(left))
    assert result.pass_rate_se == pytest.approx(
        statistics.stdev(left) / len(left) ** 0.5
    )
    assert (result.num_prompts, result.unjudged_prompts) == (len(left), 20 - len(left))
    assert result.unjudged_share == pytest.approx(sum(failed) / 20)
    assert [math.isnan(rate) for rate in result.prompt_pass_rates] == [
        gone and not wrong for gone in failed
    ]
    assert set(result.details) == {"OSError: the judge is away"}


def test_every_token_is_heard_and_every_answer_is_given(run, params, evaluation):
    heard = []
    steps = run.generators.evaluator.steps(
        params,
        policy_version=7,
        listener=lambda sample, tokens, logprobs: heard.extend(tokens.tolist()),
    )
    groups = [group for judged in steps for group in judged]
    groups.sort(key=lambda group: group.place)
    assert [group.place for group in groups] == list(range(20))
    assert sorted(heard) == sorted(
        token for group in groups for token in group.completions[0].tokens.tolist()
    )
    for group, row in zip(groups, evaluation.rollouts, strict=True):
        _, found, answer = (
            row["completion"].removesuffix("<eos>").rpartition("</think>")
        )
        assert group.answers == ((answer.strip(),) if found else (None,))
        assert group.statuses == (row["status"],)
        assert group.passed == [row["status"] == "correct"]
