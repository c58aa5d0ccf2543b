"""Prompts: how they are made, in which order they come, when they come no more."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.data.prompts import PromptStream, build_prompts
from scalerl_jax.data.tasks import Question


def encode(text):
    return [ord(character) for character in text]


def make_prompts(count):
    questions = [
        Question(task="chain_sum", text=f"{i}+{i}=", reference={"answer": str(2 * i)})
        for i in range(count)
    ]
    return build_prompts(
        questions, encode=encode, template="{question}", max_prompt_tokens=100
    )


def make_stream(count, *, seed=0, max_pass_rate=0.9):
    return PromptStream(make_prompts(count), seed=seed, max_pass_rate=max_pass_rate)


def draw(stream, count):
    prompts = [stream.next() for _ in range(count)]
    return [(prompt.epoch, prompt.prompt_id) for prompt in prompts]


def test_a_prompt_shows_the_question_in_the_template():
    question = Question(task="chain_sum", text="{1+1}", reference={"answer": "2"})
    (prompt,) = build_prompts(
        [question], encode=encode, template="{a} {question}<t>", max_prompt_tokens=13
    )
    assert prompt.text == "{a} {1+1}<t>"
    assert prompt.tokens.dtype == np.int32
    assert prompt.tokens.tolist() == encode(prompt.text)
    assert (prompt.prompt_id, prompt.epoch, prompt.task) == (0, 0, "chain_sum")
    assert prompt.reference == {"answer": "2"}


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param({"questions": []}, "no questions", id="no questions"),
        pytest.param(
            {"max_prompt_tokens": 4},
            r"prompt 1 has 5 tokens.*sampler.max_prompt_tokens = 4: '10\+1='",
            id="too long",
        ),
        pytest.param({"template": "Q:"}, "data.template = 'Q:'", id="no question"),
        pytest.param({"encode": lambda text: []}, "no tokens", id="no tokens"),
    ],
)
def test_what_cannot_be_a_prompt_is_refused(change, message):
    arguments = {
        "questions": [
            Question(task="chain_sum", text=text, reference={})
            for text in ("1+1=", "10+1=")
        ],
        "encode": encode,
        "template": "{question}",
        "max_prompt_tokens": 100,
    } | change
    with pytest.raises(ValueError, match=message):
        build_prompts(arguments.pop("questions"), **arguments)


def test_an_epoch_holds_every_prompt_once_in_an_order_of_its_own():
    drawn = draw(make_stream(20, seed=4), 60)
    orders = [[i for epoch, i in drawn if epoch == e] for e in range(3)]
    for order in orders:
        assert sorted(order) == list(range(20))
    assert orders[0] != orders[1] != orders[2]
    assert [epoch for epoch, _ in drawn] == [0] * 20 + [1] * 20 + [2] * 20
    assert drawn == draw(make_stream(20, seed=4), 60)
    assert drawn != draw(make_stream(20, seed=5), 60)


@given(
    num_prompts=st.integers(1, 12),
    cut=st.integers(0, 40),
    results=st.lists(st.integers(0, 10), min_size=60, max_size=60),
)
@settings(max_examples=100, deadline=None)
def test_a_stream_goes_on_anywhere_as_if_it_had_not_stopped(num_prompts, cut, results):
    def advance(stream, results):
        """Prompts drawn, each recorded at once with its result of 10 rollouts."""
        drawn = []
        for passed in results:
            if stream.num_retired == num_prompts:
                break
            prompt = stream.next()
            drawn.append((prompt.epoch, prompt.prompt_id))
            stream.record(prompt.prompt_id, passed, 10)
        return drawn

    whole = advance(make_stream(num_prompts), results)
    stream = make_stream(num_prompts)
    before = advance(stream, results[:cut])
    state = json.loads(json.dumps(stream.state()))
    resumed = make_stream(num_prompts)
    resumed.restore(state)
    assert before + advance(resumed, results[cut:]) == whole
    assert len(set(whole)) == len(whole)


def test_a_prompt_that_is_passed_nine_times_in_ten_is_not_sampled_again():
    stream = make_stream(3)
    assert {i for _, i in draw(stream, 3)} == {0, 1, 2}
    stream.record(0, 9, 10)
    stream.record(1, 8, 10)
    stream.record(2, 0, 10)
    assert stream.num_retired == 1
    assert {i for _, i in draw(stream, 2)} == {1, 2}
    # Over both epochs: 18 of 20 is 0.9, and 10 of 20 is not.
    stream.record(1, 10, 10)
    stream.record(2, 10, 10)
    assert stream.num_retired == 2
    assert draw(stream, 2) == [(2, 2), (3, 2)]

    resumed = make_stream(3)
    resumed.restore(stream.state())
    assert resumed.num_retired == 2
    assert draw(resumed, 1) == [(4, 2)]


def test_a_late_result_counts_from_then_on():
    """The rollouts of epoch 0 may be judged when epoch 1 has begun."""
    stream = make_stream(4)
    draw(stream, 4)
    ((_, first),) = draw(stream, 1)
    late = [i for i in range(4) if i != first]
    stream.record(late[0], 10, 10)
    assert {i for _, i in draw(stream, 2)} == set(late[1:])


def test_without_a_threshold_every_prompt_comes_back():
    stream = make_stream(2, max_pass_rate=None)
    for _ in range(3):
        for _, prompt_id in draw(stream, 2):
            stream.record(prompt_id, 10, 10)
    assert stream.num_retired == 0


def test_a_prompt_can_be_given_out_again():
    stream = make_stream(5)
    drawn = stream.next()
    again = stream.prompt(drawn.prompt_id, 3)
    assert (again.prompt_id, again.epoch) == (drawn.prompt_id, 3)
    assert again.text == drawn.text
    assert len(set(draw(stream, 4))) == 4  # the order is where it was


def test_when_no_prompt_is_left_the_setting_is_named():
    stream = make_stream(2)
    for _, prompt_id in draw(stream, 2):
        stream.record(prompt_id, 1, 1)
    with pytest.raises(ValueError, match="data.max_history_pass_rate = 0.9 or more"):
        stream.next()


def test_a_stream_of_other_prompts_or_another_seed_is_refused():
    state = make_stream(3, seed=1).state()
    with pytest.raises(ValueError, match="made with 3 prompts.*now gives 4"):
        make_stream(4, seed=1).restore(state)
    with pytest.raises(ValueError, match="seed = 1, and seed is now 2"):
        make_stream(3, seed=2).restore(state)
    with pytest.raises(ValueError, match="data.train_prompts"):
        PromptStream((), seed=0, max_pass_rate=None)
