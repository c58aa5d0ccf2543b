"""A reward function that asks a model: one that this package serves, by a key."""

import contextlib
import re
import shutil

import pytest

from scalerl_jax.config import RewardConfig
from scalerl_jax.environments.own_file import read_own
from scalerl_jax.environments.run_verifiers import make_pool

KEY = "a-key-of-twenty-signs"
SUMS = ["1 + 1", "7 - 3", "4 + 5", "8 - 6"]
# The served model is asked in the words of its training.
TEMPLATE = (
    "State the final answer to the following arithmetic problem: "
    "{{ messages[0].content }} =<think>"
)
JUDGE = """
from scalerl_jax.environments.endpoint import Judge

JUDGE = Judge(url={url!r}, model={model!r}, template="{{completion}}", key="MY_KEY",
              best=1000.0, timeout_s=60.0, max_tokens=64)

async def score(prompt, completion, reference):
    return await JUDGE(completion=completion)
"""


@pytest.mark.slow
def test_a_judge_asks_our_own_server_and_its_number_is_the_reward(
    start_server, checkpoint, tmp_path, monkeypatch
):
    model = shutil.copytree(checkpoint("sound"), tmp_path / "judge")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "key").write_text(KEY)
    monkeypatch.setenv("MY_KEY", KEY)
    file = tmp_path / "mine.py"
    flags = {"checkpoint": model, "api_key_file": tmp_path / "key"}
    with start_server(**flags, max_prompt_tokens=64) as server:
        file.write_text(JUDGE.format(url=f"{server.url}/v1", model=model.name))
        found = {}
        for variables in ((), ("MY_KEY",)):
            reward = RewardConfig(timeout_s=120.0, num_workers=1, variables=variables)
            own = read_own(f"{file}:score", reward)
            with contextlib.closing(make_pool(reward, unnamed="math", own=own)) as pool:
                pool.submit(0, "any", SUMS, {"answer": None})
                pool.wait(300.0)
                ((_, found[variables]),) = pool.poll()
        answers = [_answer(server, model.name, each) for each in SUMS]
    assert all("MY_KEY is not in the environ" in each.detail for each in found[()])
    numbers = [re.search(r"(-?\d+)\s*$", each) for each in answers]
    assert any(numbers), answers
    for verdict, number in zip(found["MY_KEY",], numbers, strict=True):
        if number and int(number[1]) >= 0:
            assert verdict.reward == int(number[1]) / 1000.0
        else:
            assert (verdict.status, verdict.reward) == ("verifier_error", None)


def _answer(server, model, text):
    """What the server says itself, to one who has the key."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0.0,
        "max_tokens": 64,
    }
    key = {"Authorization": f"Bearer {KEY}"}
    status, said = server.ask("/v1/chat/completions", body, headers=key)
    assert status == 200, said
    return said["choices"][0]["message"]["content"]
