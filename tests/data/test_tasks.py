"""Questions: where they come from, how splits are kept apart, how answers score."""

import json

import pytest
from task_splits import make_splits

from scalerl_jax.data import tasks
from scalerl_jax.data.tasks import TASKS, make_questions, score


def texts(questions):
    return [question.text for question in questions]


@pytest.mark.parametrize("names", [*[(name,) for name in TASKS], tuple(TASKS)], ids=str)
def test_held_out_questions_are_not_trained_on(names):
    train, held_out = make_splits(names, train_prompts=1500, eval_prompts=200, seed=3)
    assert (len(train), len(held_out)) == (1500, 200)
    assert len({*texts(train), *texts(held_out)}) == 1700


def test_tasks_have_equal_parts_and_the_first_ones_the_rest():
    names = ("products", "chain_sum", "spell_backward")
    train, held_out = make_splits(names, train_prompts=11, eval_prompts=4, seed=0)
    for questions, shares in [(train, [4, 4, 3]), (held_out, [2, 1, 1])]:
        drawn = [question.task for question in questions]
        assert [drawn.count(name) for name in names] == shares


def test_splits_are_the_same_every_time_and_eval_does_not_know_the_seed():
    def split(seed):
        return make_splits(
            ("chain_sum", "letter_counting"),
            train_prompts=50,
            eval_prompts=20,
            seed=seed,
        )

    assert split(1) == split(1)
    assert texts(split(1)[0]) != texts(split(2)[0])
    assert split(1)[1] == split(2)[1]


def test_excluded_texts_are_passed_over():
    first = make_questions("chain_sum", count=30, seed=5, exclude=set())
    again = make_questions("chain_sum", count=30, seed=5, exclude=set(texts(first[:7])))
    assert texts(again)[:23] == texts(first)[7:]


@pytest.mark.parametrize("task", sorted({*TASKS} - {"needle_haystack"}))  # two lines
def test_questions_are_spelled_with_known_characters_and_are_json(task):
    questions = make_questions(task, count=300, seed=0, exclude=set())
    for question in questions:
        assert all(" " <= character <= "~" for character in question.text)
        reference = question.reference
        assert json.loads(json.dumps(reference)) == reference
        if task in ("spell_backward", "letter_counting"):
            words = question.text.split(": ")[-1]
            assert words == words.lower()


@pytest.mark.parametrize("task", TASKS)
def test_the_reference_answer_is_right_and_another_is_not(task):
    for question in make_questions(task, count=50, seed=0, exclude=set()):
        answer = question.reference["answer"]
        assert score(task, answer, question.reference) == 1.0
        assert score(task, answer + "7", question.reference) < 1.0
        assert score(task, "", question.reference) < 1.0


def test_part_of_an_answer_is_partial_credit():
    reference = {"answer": "tac", "metadata": {"word": "cat"}}
    assert score("spell_backward", "tax", reference) == pytest.approx(2 / 3)
    assert score("chain_sum", "it is 12", {"answer": "12"}) == pytest.approx(2 / 8)
    assert score("chain_sum", "+012.0", {"answer": "12"}) == 1.0


@pytest.mark.parametrize(
    "text, kept",
    [
        ("Spell this word backward (example: sun -> nus): tree", True),
        ("Spell this word backward (example: sun -> nus): Tree", False),
        ('How often is "a" in the text: "the aërial"?', False),
        ('How often is "a" in the text: "by Wilson"?', False),
        ('How often is "2" in the text: "2889"?', False),
        ('How often is "a" in the text: "in 2889"?', True),
    ],
)
def test_words_are_lower_case_ascii(text, kept):
    assert tasks.has_lower_case_words(text) == kept


@pytest.mark.slow
def test_a_task_without_enough_questions_says_how_many_it_has():
    with pytest.raises(ValueError, match="data.train_prompts .* 8201 .* 8"):
        make_questions("products", count=8201, seed=0, exclude=set())
    with pytest.raises(ValueError, match="eval.num_prompts .* 9000 .*'products'"):
        make_splits(("products",), train_prompts=1, eval_prompts=9000, seed=0)


def test_an_unknown_task_is_answered_with_the_known_ones():
    for call in (
        lambda: make_questions("sums", count=1, seed=0, exclude=set()),
        lambda: score("sums", "1", {"answer": "1"}),
    ):
        with pytest.raises(ValueError, match="'sums'; choose from .*'chain_sum'"):
            call()


@pytest.mark.parametrize(
    "names", [(), ("chain_sum", "chain_sum")], ids=["none", "twice"]
)
def test_tasks_must_be_named_once(names):
    with pytest.raises(ValueError, match="data.tasks"):
        make_splits(names, train_prompts=2, eval_prompts=2, seed=0)
