"""Mixtures of tasks: the share of each, ids, histories, and going on."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.data.mixture import Levels, MixtureStream
from scalerl_jax.data.prompts import PromptStream, build_prompts, read_numbers
from scalerl_jax.data.questions import Question


def make_stream(sizes, weights, *, seed=0, max_pass_rate=0.9, levels=None):
    streams = []
    for number, size in enumerate(sizes):
        prompts = build_prompts(
            [
                Question(task=f"task{number}", text=f"{number}.{i}", reference={})
                for i in range(size)
            ],
            encode=lambda text: [1],
            render=lambda question: question.text,
            max_prompt_tokens=1,
        )
        streams.append(PromptStream(prompts, seed=seed, max_pass_rate=max_pass_rate))
    return MixtureStream(streams, weights=weights, levels=levels)


def tasks_of(stream, count):
    return [stream.next().task for _ in range(count)]


weights = st.lists(
    st.one_of(st.integers(1, 50), st.decimals("0.01", "10", places=2).map(float)),
    min_size=1,
    max_size=6,
)


@given(weights=weights)
@settings(max_examples=100, deadline=None)
def test_every_prefix_has_the_shares_to_within_one_draw(weights):
    stream = make_stream([3] * len(weights), weights)
    total = sum(weights)
    draws = [0] * len(weights)
    for count in range(1, 121):
        draws[int(stream.next().task.removeprefix("task"))] += 1
        for drawn, weight in zip(draws, weights, strict=True):
            assert abs(drawn - weight / total * count) < 1 + 1e-9


def test_the_order_of_tasks_by_hand():
    """Halves take turns; of 3 : 1 the fourth is the other's."""
    assert tasks_of(make_stream([9, 9], (1, 1)), 4) == ["task0", "task1"] * 2
    assert tasks_of(make_stream([9, 9], (0.75, 0.25)), 8) == [
        *("task0", "task0", "task0", "task1"),
        *("task0", "task0", "task0", "task1"),
    ]


def test_ids_count_through_the_tasks_and_each_task_has_epochs_of_its_own():
    stream = make_stream([1, 4], (1, 1))
    drawn = [stream.next() for _ in range(8)]
    assert [(each.prompt_id, each.epoch) for each in drawn if each.task == "task0"] == [
        (0, epoch) for epoch in range(4)
    ]
    others = [each for each in drawn if each.task == "task1"]
    assert sorted(each.prompt_id for each in others) == [1, 2, 3, 4]
    assert {each.epoch for each in others} == {0}
    for each in drawn:
        assert stream.prompt(each.prompt_id, each.epoch) == each


def test_a_task_without_prompts_left_gives_its_draws_to_the_others():
    stream = make_stream([1, 3], (3, 1))
    assert stream.num_prompts == 4
    first = stream.next()
    assert first.task == "task0"
    stream.record(first.prompt_id, 10, 10)
    assert stream.num_retired == 1
    assert set(tasks_of(stream, 6)) == {"task1"}
    for prompt_id in (1, 2, 3):
        stream.record(prompt_id, 10, 10)
    with pytest.raises(ValueError, match="data.max_history_pass_rate = 0.9"):
        stream.next()


def test_a_level_opens_once_the_one_before_it_is_passed():
    """By the newest two prompts: no older ones, and none of other levels, count."""
    levels = Levels(pass_rate=0.5, num_prompts=2)
    stream = make_stream([4, 4, 4], (1, 1, 2), levels=levels)

    def results(*passed):
        drawn = [stream.next() for _ in passed]
        for prompt, each in zip(drawn, passed, strict=True):
            stream.record(prompt.prompt_id, each, 10)
        return [prompt.task for prompt in drawn], stream.figures["data/open_tasks"]

    assert results(8) == (["task0"], 1)  # one prompt says nothing yet
    assert results(1) == (["task0"], 1)  # 9 of 20
    assert results(9) == (["task0"], 2)  # 10 of 20: the first is forgotten
    # The two share the draws from here on; the passed level opens no other.
    assert results(8, 1, 8, 1) == (["task0", "task1"] * 2, 2)
    assert results(8, 9) == (["task0", "task1"], 3)  # 1 + 9 of 20
    assert results(0, 0, 0, 0) == (["task2", "task0", "task1", "task2"], 3)
    saved = json.loads(json.dumps(stream.state()))
    resumed = make_stream([4, 4, 4], (1, 1, 2), levels=levels)
    resumed.restore(saved)
    assert resumed.figures == stream.figures
    # Those of a run that had all tasks open stay open.
    resumed.restore(make_stream([4, 4, 4], (1, 1, 2)).state())
    assert resumed.figures["data/open_tasks"] == 3


def test_a_level_opens_where_the_one_before_it_has_no_prompt_left():
    levels = Levels(pass_rate=1.0, num_prompts=50)
    stream = make_stream([1, 2], (1, 1), levels=levels)
    stream.record(stream.next().prompt_id, 10, 10)
    assert stream.next().task == "task1"
    assert stream.figures == {"data/retired_prompts": 1, "data/open_tasks": 2}


def test_a_level_opens_although_an_earlier_one_has_prompts_left():
    """The second level runs out of prompts before it has enough results."""
    levels = Levels(pass_rate=0.5, num_prompts=2)
    stream = make_stream([3, 1, 2], (1, 1, 1), levels=levels)
    for passed in (5, 5, 5, 10):
        stream.record(stream.next().prompt_id, passed, 10)
    assert stream.figures == {"data/retired_prompts": 1, "data/open_tasks": 2}
    assert tasks_of(stream, 4) == ["task0", "task2"] * 2


def test_results_go_to_the_history_of_their_task():
    stream = make_stream([2, 2], (1, 1))
    stream.record(3, 5, 10)
    histories = [
        read_numbers(each["rollouts"]).tolist() for each in stream.state()["streams"]
    ]
    assert histories == [[0, 0], [0, 10]]


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    weights=st.lists(st.sampled_from([0.1, 0.2, 1, 3, 7.5]), min_size=4, max_size=4),
    cut=st.integers(0, 40),
    results=st.lists(st.integers(0, 10), min_size=50, max_size=50),
    levels=st.sampled_from([None, Levels(pass_rate=0.5, num_prompts=2)]),
)
@settings(max_examples=100, deadline=None)
def test_a_mixture_goes_on_anywhere_as_if_it_had_not_stopped(
    sizes, weights, cut, results, levels
):
    def made():
        return make_stream(sizes, weights[: len(sizes)], seed=3, levels=levels)

    def advance(stream, results):
        drawn = []
        for passed in results:
            if stream.num_retired == stream.num_prompts:
                break
            prompt = stream.next()
            drawn.append((prompt.epoch, prompt.prompt_id))
            stream.record(prompt.prompt_id, passed, 10)
        return drawn

    whole = advance(made(), results)
    stream = made()
    before = advance(stream, results[:cut])
    state = json.loads(json.dumps(stream.state()))
    resumed = made()
    resumed.restore(state)
    assert resumed.state() == state
    assert before + advance(resumed, results[cut:]) == whole
    assert len(set(whole)) == len(whole)


def test_other_weights_are_refused():
    state = make_stream([2, 2], (1, 3)).state()
    with pytest.raises(ValueError, match=r"\[1, 3\].*data.task_weights .*\[1"):
        make_stream([2, 2], (1, 1)).restore(state)
    make_stream([2, 2], (1.0, 3.0)).restore(state)
