"""Prompts: how they are made, in which order they come, when they come no more."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.data.prompts import (
    JoinedPrompts,
    PromptStream,
    build_prompts,
    read_numbers,
    save_numbers,
)
from scalerl_jax.data.questions import Question
from scalerl_jax.data.splits import LazyPrompts


def encode(text):
    return [ord(character) for character in text]


def as_it_is(question):
    return question.text


def make_questions(count, *, task="chain_sum"):
    return [
        Question(task=task, text=f"{i}+{i}=", reference={"answer": str(2 * i)})
        for i in range(count)
    ]


def make_prompts(count, *, task="chain_sum"):
    return build_prompts(
        make_questions(count, task=task),
        encode=encode,
        render=as_it_is,
        max_prompt_tokens=100,
    )


def make_stream(count, *, seed=0, max_pass_rate=0.9):
    return PromptStream(make_prompts(count), seed=seed, max_pass_rate=max_pass_rate)


def draw(stream, count):
    prompts = [stream.next() for _ in range(count)]
    return [(prompt.epoch, prompt.prompt_id) for prompt in prompts]


def test_a_prompt_is_its_question_as_rendered():
    question = Question(task="chain_sum", text="{1+1}", reference={"answer": "2"})
    (prompt,) = build_prompts(
        [question],
        encode=encode,
        render=lambda question: f"{{a}} {question.text}<t>",
        max_prompt_tokens=13,
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
            "prompt 1 .*sampler.max_prompt_tokens = 4: ",
            id="too long",
        ),
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
        "render": as_it_is,
        "max_prompt_tokens": 100,
    } | change
    with pytest.raises(ValueError, match=message):
        build_prompts(arguments.pop("questions"), **arguments)


class Counting(Sequence):
    """Questions that remember which of them were read."""

    def __init__(self, questions):
        self.questions = questions
        self.read = []

    def __len__(self):
        return len(self.questions)

    def __getitem__(self, place):
        self.read.append(place)
        return self.questions[place]


def lazy(questions, places, *, task="set@train"):
    return LazyPrompts(
        questions, np.array(places), task=task, encode=encode, render=as_it_is
    )


def test_a_lazy_prompt_is_read_when_it_is_asked_for():
    questions = Counting(make_questions(5))
    prompts = lazy(questions, [0, 2, 4])
    assert len(prompts) == 3 and questions.read == []
    prompt = prompts[1]
    assert questions.read == [2]
    assert (prompt.prompt_id, prompt.epoch) == (1, 0)
    assert (prompt.task, prompt.text) == ("set@train", "2+2=")
    assert prompt.tokens.tolist() == encode("2+2=") and prompt.tokens.dtype == np.int32
    assert prompt.reference == {"answer": "4"}


def test_lazy_prompts_are_a_sequence():
    prompts = lazy(make_questions(5), [0, 2, 4])
    assert [prompt.text for prompt in prompts] == ["0+0=", "2+2=", "4+4="]
    assert [prompt.prompt_id for prompt in prompts[1:]] == [1, 2]
    assert prompts[-1].text == "4+4="
    with pytest.raises(IndexError):
        prompts[3]


def test_joined_prompts_have_ids_through_all_parts():
    parts = [make_prompts(3), lazy(make_questions(9), [7, 8]), make_prompts(1)]
    joined = JoinedPrompts(parts)
    assert len(joined) == 6
    assert [prompt.prompt_id for prompt in joined] == list(range(6))
    assert [prompt.text for prompt in joined] == [
        *("0+0=", "1+1=", "2+2="),
        *("7+7=", "8+8="),
        "0+0=",
    ]
    assert joined[-2].text == "8+8="
    with pytest.raises(IndexError):
        joined[6]
    assert len(JoinedPrompts([])) == 0


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
    if cut % 2:  # as older checkpoints have it
        state = {
            name: read_numbers(value).tolist() if isinstance(value, dict) else value
            for name, value in state.items()
        }
    resumed = make_stream(num_prompts)
    resumed.restore(state)
    assert before + advance(resumed, results[cut:]) == whole
    assert len(set(whole)) == len(whole)


@pytest.mark.parametrize(
    "numbers, kind",
    [
        pytest.param([], "|u1", id="none"),
        pytest.param([0, 255], "|u1", id="bytes"),
        pytest.param([0, 256], "<u2", id="larger"),
        pytest.param([2**40, 1], "<u8", id="largest"),
        pytest.param([0.5, np.nan], "<f8", id="pass rates"),
    ],
)
def test_a_history_is_saved_in_the_fewest_bytes_a_number(numbers, kind):
    dtype = np.float64 if kind == "<f8" else np.int64
    saved = save_numbers(np.array(numbers, dtype))
    assert saved["dtype"] == kind
    found = read_numbers(json.loads(json.dumps(saved)))
    np.testing.assert_array_equal(found, np.array(numbers, dtype))


@pytest.mark.parametrize(
    "saved",
    [
        {"dtype": "|O8", "base64": "AAAAAAAAAAA="},
        {"dtype": "<u2", "base64": "AAA="[:3]},
        {"dtype": "<u2", "base64": "AA=="},
        {"dtype": "<u2", "base64": "!!!!"},
        {"dtype": "<u2"},
        "AAAA",
    ],
)
def test_a_damaged_history_is_refused(saved):
    with pytest.raises(ValueError, match="the history of prompts is damaged"):
        read_numbers(saved)


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


def test_a_result_that_was_under_way_brings_no_prompt_back():
    stream = make_stream(2)
    draw(stream, 4)  # both epochs are in flight
    stream.record(0, 15, 16)
    stream.record(0, 4, 16)  # 19 of 32
    assert stream.num_retired == 1
    assert draw(stream, 2) == [(2, 1), (3, 1)]
    resumed = make_stream(2)
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert resumed.num_retired == 1
    assert draw(resumed, 1) == [(4, 1)]


def test_a_checkpoint_that_names_no_retired_prompts_has_them_in_its_history():
    stream = make_stream(3)
    stream.record(0, 15, 16)
    stream.record(1, 15, 16)
    stream.record(1, 4, 16)
    state = stream.state()
    assert read_numbers(state.pop("retired")).tolist() == [0, 1]
    resumed = make_stream(3)
    resumed.restore(state)
    assert read_numbers(resumed.state()["retired"]).tolist() == [0]


@given(
    num_prompts=st.integers(1, 3),
    cut=st.integers(0, 40),
    events=st.lists(
        # Draw a prompt, or have a group in flight end with so many of 10.
        st.one_of(
            st.none(), st.tuples(st.integers(0, 5), st.sampled_from([0, 8, 9, 10]))
        ),
        min_size=20,
        max_size=40,
    ),
)
@settings(max_examples=100, deadline=None)
def test_a_prompt_is_retired_for_good(num_prompts, cut, events):
    stream = make_stream(num_prompts)
    in_flight, retired = [], set()
    history = {place: (0, 0) for place in range(num_prompts)}
    for number, event in enumerate(events):
        if number == cut:
            saved = json.loads(json.dumps(stream.state()))
            stream = make_stream(num_prompts)
            stream.restore(saved)
        if event is None and len(retired) < num_prompts:
            prompt = stream.next()
            assert prompt.prompt_id not in retired
            in_flight.append(prompt.prompt_id)
        elif event is not None and in_flight:
            done = in_flight.pop(event[0] % len(in_flight))
            stream.record(done, event[1], 10)
            passed, total = history[done]
            history[done] = passed + event[1], total + 10
            if 10 * history[done][0] >= 9 * history[done][1]:
                retired.add(done)
        assert stream.num_retired == len(retired)


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


def slow_order(num_prompts, *, seed, max_pass_rate, results):
    """What a stream gives, by the rule said in words, with no bookkeeping kept.

    The least drawn of the prompts that are left, in the shuffled order of the epoch
    that this draw is of; each is recorded at once, with so many passed of 10.
    """
    drawn = [0] * num_prompts
    passed = [0] * num_prompts
    order = []
    for result in results:
        left = [
            i
            for i in range(num_prompts)
            if not drawn[i] or passed[i] / (10 * drawn[i]) < max_pass_rate
        ]
        if not left:
            break
        least = min(drawn[i] for i in left)
        epoch = max([least, *(epoch for epoch, _ in order)])
        random = np.random.Generator(np.random.PCG64([seed, 2, epoch]))
        shuffled = random.permutation(num_prompts).tolist()
        chosen = min(left, key=lambda i: (drawn[i], shuffled.index(i)))
        order.append((drawn[chosen], chosen))
        drawn[chosen] += 1
        passed[chosen] += result
    return order


@given(
    num_prompts=st.integers(1, 8),
    seed=st.integers(0, 3),
    results=st.lists(st.integers(0, 10), max_size=40),
)
@settings(max_examples=100, deadline=None)
def test_the_order_is_that_of_the_rule(num_prompts, seed, results):
    stream = make_stream(num_prompts, seed=seed, max_pass_rate=0.9)
    drawn = []
    for passed in results:
        if stream.num_retired == num_prompts:
            break
        prompt = stream.next()
        drawn.append((prompt.epoch, prompt.prompt_id))
        stream.record(prompt.prompt_id, passed, 10)
    assert drawn == slow_order(
        num_prompts, seed=seed, max_pass_rate=0.9, results=results
    )
