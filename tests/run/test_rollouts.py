"""Rollouts that are kept with their token ids, and which of them are learned."""

import json

import numpy as np
import pytest
from test_assembly import CUT, MIXED

from scalerl_jax.run.rollouts import KeptRollout, chosen, read_rollouts, rollout_rows


def test_what_is_kept_is_read_back(tmp_path):
    file = tmp_path / "train_rollouts.jsonl"
    rows = list(rollout_rows([MIXED, CUT], step=7))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 8, "pa')
    found = list(read_rollouts(file))
    rollouts = [(group, each) for group in (MIXED, CUT) for each in group.rollouts]
    for (group, rollout), each in zip(rollouts, found, strict=True):
        np.testing.assert_array_equal(each.prompt_tokens, group.prompt.tokens)
        for name in ("completion_tokens", "completion_mask"):
            np.testing.assert_array_equal(getattr(each, name), getattr(rollout, name))
        assert (each.reward, each.passed) == (rollout.reward, rollout.passed)
        assert each.step == 7


def kept(prompt, completion, *, step=1, reward=0.0, passed=False, judged=True):
    return KeptRollout(
        prompt_tokens=np.int32([prompt]),
        completion_tokens=np.int32(completion),
        completion_mask=np.ones(len(completion), bool),
        step=step,
        reward=reward,
        passed=passed,
        judged=judged,
    )


ROLLOUTS = [
    kept(1, [1], reward=1.0, passed=True, step=1),
    kept(1, [2], reward=0.2, passed=False),
    kept(1, [1], reward=1.0, passed=True, step=4),  # the same text, later
    kept(1, [3], reward=1.0, passed=True, step=3),
    kept(1, [4], reward=9.0, passed=True, judged=False),
    kept(2, [1], reward=0.1),
    kept(2, [2], reward=0.3),
    kept(2, [5], reward=0.3, step=2),
]


@pytest.mark.parametrize(
    "choice, per_prompt, expected",
    [
        ("passed", 0, [(1, [1]), (1, [3])]),
        ("passed", 1, [(1, [1])]),
        ("best", 0, [(1, [1]), (1, [3]), (2, [5]), (2, [2])]),
        ("best", 1, [(1, [1]), (2, [5])]),
    ],
)
def test_what_passed_or_is_best_is_chosen_prompt_by_prompt(
    choice, per_prompt, expected
):
    found = chosen(ROLLOUTS, choice=choice, per_prompt=per_prompt)
    assert [
        (int(each.prompt_tokens[0]), each.completion_tokens.tolist()) for each in found
    ] == expected
