"""Where an answer begins in the text of a completion."""

import pytest

from scalerl_jax.data.questions import extract_answer


@pytest.mark.parametrize(
    "text, answer",
    [
        ("a</think> 12 ", "12"),
        ("a</think>1</think>\n2", "2"),
        ("a</think>", ""),
        ("a</thin 12", None),
        ("", None),
    ],
)
def test_the_answer_follows_the_last_mark(text, answer):
    assert extract_answer(text, answer_after="</think>") == answer


def test_without_a_mark_all_of_the_text_is_the_answer():
    assert extract_answer(" a</think>1 ", answer_after="") == "a</think>1"
