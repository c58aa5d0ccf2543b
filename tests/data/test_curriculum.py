"""Difficulty: its file, the order that it makes, and what is open when."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.data.curriculum import (
    Curriculum,
    CurriculumStream,
    easiest_first,
    prompt_digest,
    read_pass_rates,
)
from scalerl_jax.data.prompts import PromptStream, build_prompts
from scalerl_jax.data.questions import Question

RATES = np.array([0.5, 1.0, 0.0, 0.25, 0.75, 0.5])
EASY_TO_HARD = [1, 4, 0, 5, 3, 2]  # by hand; 0 and 5 are equal


def make_prompts(count):
    return build_prompts(
        [Question(task="any", text=f"{i}+{i}", reference={}) for i in range(count)],
        encode=lambda text: [1],
        render=lambda question: f"{question.text}=",
        max_prompt_tokens=1,
    )


def make_stream(curriculum, *, prompts=6, max_pass_rate=None):
    return CurriculumStream(
        make_prompts(prompts),
        seed=3,
        max_pass_rate=max_pass_rate,
        curriculum=curriculum,
    )


def draw(stream, count, *, step=0):
    prompts = [stream.next(step) for _ in range(count)]
    return [(prompt.epoch, prompt.prompt_id) for prompt in prompts]


def test_the_easiest_come_first_equal_ones_as_given_unmeasured_ones_last():
    assert easiest_first(RATES).tolist() == [1, 4, 0, 5, 3, 2]
    assert easiest_first(np.array([np.nan, 0.0, 1.0])).tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    "step, expected", [(0, 20), (1, 28), (5, 60), (10, 100), (99, 100)]
)
def test_the_open_share_grows_evenly(step, expected):
    """From a fifth of 100 prompts by 8 each step to all of them at step 10."""
    curriculum = Curriculum(pass_rates=None, open_share=0.2, open_steps=10)
    assert curriculum.num_open(100, step=step) == expected


def test_few_prompts_leave_one_open_and_without_steps_all_are():
    few = Curriculum(pass_rates=None, open_share=0.01, open_steps=10)
    assert few.num_open(3, step=0) == 1
    assert Curriculum(pass_rates=None).num_open(3, step=0) == 3


def test_sorted_prompts_come_easy_to_hard_in_every_epoch():
    stream = make_stream(Curriculum(pass_rates=RATES))
    order = [prompt_id for _, prompt_id in draw(stream, 12)]
    assert order == EASY_TO_HARD * 2


def test_without_a_file_the_first_epoch_measures_and_the_next_is_sorted():
    stream = make_stream(Curriculum(pass_rates=None))
    plain = PromptStream(make_prompts(6), seed=3, max_pass_rate=None)
    assert draw(stream, 6) == draw(plain, 6)
    for prompt_id, rate in enumerate(RATES):
        stream.record(prompt_id, int(8 * rate), 8)
    assert draw(stream, 2) == [(1, 1), (1, 4)]
    # What comes to be known in this epoch sorts the next one.
    stream.record(2, 1000, 1000)
    resumed = make_stream(Curriculum(pass_rates=None))
    resumed.restore(json.loads(json.dumps(stream.state())))
    for each in (stream, resumed):
        assert draw(each, 4) == [(1, prompt_id) for prompt_id in EASY_TO_HARD[2:]]
        assert draw(each, 1) == [(2, 1)]
        assert draw(each, 1) == [(2, 2)]


def test_prompts_open_step_by_step_and_a_new_one_comes_at_once():
    """A third of six is open at step 0, and all of them at step 4."""
    curriculum = Curriculum(pass_rates=RATES, open_share=1 / 3, open_steps=4)
    stream = make_stream(curriculum)
    first = draw(stream, 4, step=0)
    assert sorted(first[:2]) == [(0, 1), (0, 4)]
    assert sorted(first[2:]) == [(1, 1), (1, 4)]
    # (1/3 + 2/3 * 1/4) * 6 = 3, and prompt 0 is the third easiest.
    assert draw(stream, 1, step=1) == [(0, 0)]
    later = draw(stream, 4, step=4)
    assert sorted(later[:3]) == [(0, 2), (0, 3), (0, 5)]
    # Prompts 1 and 4 have been drawn twice, all others once.
    assert later[3] in [(1, 0), (1, 2), (1, 3), (1, 5)]


def test_prompts_that_are_left_out_make_room_for_harder_ones():
    curriculum = Curriculum(pass_rates=RATES, open_share=0.5, open_steps=1000)
    stream = make_stream(curriculum, max_pass_rate=0.9)
    assert {prompt_id for _, prompt_id in draw(stream, 3)} == {1, 4, 0}
    for prompt_id in (1, 4):
        stream.record(prompt_id, 10, 10)
    assert draw(stream, 1) == [(0, 5)]  # half of the four that are left: 0 and 5


@given(
    cut=st.integers(0, 50),
    steps=st.lists(st.integers(0, 3), min_size=50, max_size=50),
    measured=st.booleans(),
    open_steps=st.sampled_from([0, 10]),
)
@settings(max_examples=50, deadline=None)
def test_a_curriculum_goes_on_anywhere_as_if_it_had_not_stopped(
    cut, steps, measured, open_steps
):
    curriculum = Curriculum(
        pass_rates=None if measured else RATES, open_share=0.3, open_steps=open_steps
    )

    def advance(stream, numbered_steps):
        drawn = []
        for number, step in numbered_steps:
            prompt = stream.next(step)
            drawn.append((prompt.epoch, prompt.prompt_id))
            stream.record(prompt.prompt_id, number * 7 % 10, 10)
        return drawn

    numbered = list(enumerate(np.cumsum(steps).tolist()))
    whole = advance(make_stream(curriculum), numbered)
    stream = make_stream(curriculum)
    before = advance(stream, numbered[:cut])
    resumed = make_stream(curriculum)
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert before + advance(resumed, numbered[cut:]) == whole
    assert len(set(whole)) == len(whole)  # no prompt twice in an epoch of its own


def write(tmp_path, *lines):
    path = tmp_path / "difficulty.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_file_names_prompts_by_number_or_by_their_text(tmp_path):
    prompts = make_prompts(3)
    text = hashlib.sha256(prompts[1].text.encode()).hexdigest()
    path = write(
        tmp_path,
        '{"prompt_id": 2, "pass_rate": 0.25, "source": "elsewhere"}',
        "",
        f'{{"sha256": "{text}", "pass_rate": 1}}',
        '{"sha256": "of no prompt here", "pass_rate": 0.5}',
        '{"prompt_id": 0, "pass_rate": 0.0}',
    )
    assert read_pass_rates(path, prompts).tolist() == [0.0, 1.0, 0.25]


def test_tasks_of_one_text_have_a_pass_rate_each(tmp_path):
    prompts = [
        dataclasses.replace(
            prompt, text="Play.", reference={"answer": {"unlike": name}}
        )
        for prompt, name in zip(make_prompts(2), "ab", strict=True)
    ]
    rows = [
        {
            "sha256": hashlib.sha256(f"Play. {name}".encode()).hexdigest(),
            "pass_rate": rate,
        }
        for name, rate in (("b", 0.5), ("a", 0.25))
    ]
    path = write(tmp_path, *map(json.dumps, rows))
    assert read_pass_rates(path, prompts).tolist() == [0.25, 0.5]
    assert [prompt_digest(each) for each in reversed(prompts)] == [
        row["sha256"] for row in rows
    ]


@pytest.mark.parametrize(
    "line, message",
    [
        pytest.param("{", "Expecting property name", id="not JSON"),
        pytest.param("3", "3 is not an object with a pass_rate", id="no object"),
        pytest.param('{"prompt_id": 1}', "pass_rate = None must be", id="no rate"),
        pytest.param(
            '{"prompt_id": 1, "pass_rate": true}', "pass_rate = True must", id="bool"
        ),
        pytest.param(
            '{"prompt_id": 1, "pass_rate": 1.5}',
            r"pass_rate = 1.5 must be in \[0, 1\]",
            id="above 1",
        ),
        pytest.param(
            '{"prompt_id": 1, "pass_rate": NaN}', "pass_rate = nan must", id="NaN"
        ),
        pytest.param('{"pass_rate": 0.5}', "prompt_id or sha256", id="no name"),
        pytest.param(
            '{"prompt_id": 3, "pass_rate": 0.5}',
            "prompt_id = 3 must be from 0 to 2",
            id="no such prompt",
        ),
        pytest.param(
            '{"prompt_id": 0, "pass_rate": 0.5}',
            "prompt 0 was named before",
            id="twice",
        ),
    ],
)
def test_a_wrong_line_is_named_by_its_number(tmp_path, line, message):
    path = write(tmp_path, '{"prompt_id": 0, "pass_rate": 0.5}', line)
    with pytest.raises(ValueError, match=f"difficulty.jsonl, line 2: .*{message}"):
        read_pass_rates(path, make_prompts(3))


def test_prompts_without_a_pass_rate_are_counted(tmp_path):
    path = write(tmp_path, '{"prompt_id": 0, "pass_rate": 0.5}')
    with pytest.raises(ValueError, match=r"2 of 3 .* prompt 1: '1\+1"):
        read_pass_rates(path, make_prompts(3))
    with pytest.raises(ValueError, match="nowhere: there is no such file"):
        read_pass_rates(tmp_path / "nowhere", make_prompts(3))
