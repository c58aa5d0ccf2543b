"""Whole runs with an environment of several turns, on the base of configs/tools.py.

The base calls its calculator in one of seven completions, or thereabouts.
"""

import runpy
import textwrap

import pytest
import small_run

from scalerl_jax import config as config_lib
from scalerl_jax import main

SETTINGS = {
    "compile_cache": "",
    "data.train_prompts": 60,
    "batch.num_prompts": 8,
    "batch.group_size": 4,
    "sampler.slots": 16,
    "sampler.max_completion_tokens": 48,
    "optimizer.learning_rate": 3e-4,
    "optimizer.warmup_steps": 2,
    "eval.num_prompts": 12,
    "eval.samples_per_prompt": 1,
    "eval.every": 2,
    "checkpoint.every": 1,
    "train.num_steps": 2,
}


def run(directory, *, config="tools", **changes):
    """Train with the settings of a config, and these changes."""
    file = small_run.ROOT / "configs" / f"{config}.py"
    settings = runpy.run_path(str(file))["get_config"]()
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    settings.update_from_flattened_dict(SETTINGS | changed)
    return main.run(config_lib.resolve(settings), str(directory))


@pytest.mark.slow
def test_a_policy_that_calls_a_tool_is_trained_on_its_own_tokens(tmp_path):
    run(tmp_path, queue__max_staleness=0, queue__max_waiting=0)
    for row in small_run.rows(tmp_path):
        assert row["episode/mean_turns"] > 1.0
        assert 0.5 < row["episode/sampled_share"] < 1.0
        assert row["verifier/unjudged_share"] == 0.0
        # The learner has the tokens that the sampler had, observations among them.
        assert row["ratio/max"] == pytest.approx(1.0, abs=1e-3)
        assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    for row in small_run.rows(tmp_path, "evals.jsonl"):
        assert row["mean_turns"] >= 1.0
    called = [
        row
        for row in small_run.rows(tmp_path, "rollouts.jsonl")
        if len(row["turns"]) > 1
    ]
    for row in called:
        ends = [turn["end"] for turn in row["turns"]]
        texts = [
            row["completion"][start:end]
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        assert [turn["sampled"] for turn in row["turns"]] == [
            number % 2 == 0 for number in range(len(ends))
        ]
        assert texts[0].startswith('<tool_call>{"name": "calculator"')
        assert texts[1].startswith("<tool_response>")
        assert texts[1].endswith("</tool_response>")


TALK = """
    class Talk:
        def begin(self, prompt, reference):
            self.heard = 0
            return "="

        def step(self, completion):
            self.heard += 1
            if self.heard == 1 and len(completion) % 2:
                return More(tokens=[5, 9, 5])
            if self.heard == 1:
                return More("again </think>")
            return Done(len(completion) % 7 / 6)

        def cut(self):
            return 0.5
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, changes",
    [
        pytest.param(
            "tiny_moe", {"model.sampler_dtype": "float32"}, id="routing is replayed"
        ),
        pytest.param(
            "tiny",
            {"batch.shared_tokens": 256, "batch.own_tokens": 1024},
            id="prompts are shared",
        ),
    ],
)
def test_episodes_are_alike_for_the_learner_however_they_are_laid_out(
    tmp_path, config, changes
):
    """Turns in texts and in ids, behind an opening, several episodes in a row."""
    file = tmp_path / "talk.py"
    names = "from scalerl_jax.environments.verdict import Done, More\n"
    file.write_text(names + textwrap.dedent(TALK))
    run(
        tmp_path / "run",
        config=config,
        environment=f"{file}:Talk",
        episode__between="{observation}<think>",
        sampler__max_completion_tokens=96,
        batch__row_tokens=160,
        queue__max_staleness=0,
        queue__max_waiting=0,
        **changes,
    )
    for row in small_run.rows(tmp_path / "run"):
        assert row["episode/mean_turns"] > 1.5
        assert row["ratio/max"] == pytest.approx(1.0, abs=1e-3)
        assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["verifier/unjudged_share"] == 0.0


DYING = """
    import os
    from scalerl_jax.environments.tools import Tool, Tools

    CALLS = 0

    def calculator(expression):
        global CALLS
        CALLS += 1
        if CALLS == 3:
            os._exit(11)
        return "7"

    def judge(prompt, completion, reference):
        return len(completion) % 7 / 6  # the base solves too few for a gradient

    def make():
        tool = Tool("calculator", "expression", "A sum.", calculator)
        return Tools([tool], judge)
"""


@pytest.mark.slow
def test_a_tool_that_dies_costs_its_episode_and_not_the_run(tmp_path):
    file = tmp_path / "dying.py"
    file.write_text(textwrap.dedent(DYING))
    changes = {
        "environment": f"{file}:make",
        "reward__max_unjudged_share": 1.0,
        "reward__num_workers": 1,
    }
    directory = tmp_path / "run"
    run(directory, **changes)
    rows = small_run.rows(directory)
    assert len(rows) == 2
    assert any(row["verifier/error_share"] > 0 for row in rows)
    assert all(row["verifier/error_share"] < 1 for row in rows)
    run(directory, train__num_steps=3, **changes)
    rows = small_run.rows(directory)
    assert [row["step"] for row in rows] == [1, 2, 3]
