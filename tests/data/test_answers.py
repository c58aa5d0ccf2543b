"""Answers in rows: what is learned of them, written out by hand for a chat template."""

import numpy as np
import pytest
from small_chat import SMOLLM2, TEMPLATES, make_directory

from scalerl_jax.config import DataConfig
from scalerl_jax.data.answers import Writer, read_answers
from scalerl_jax.data.chat import read_chat_template
from scalerl_jax.data.drafts import Malformed, Unusable
from scalerl_jax.data.records import Tally
from scalerl_jax.data.tokenizer import load_tokenizer

USER, END = "<|im_start|>user\n", "<|im_end|>\n"
REPLY = "<|im_start|>assistant\n"
SYSTEM = f"<|im_start|>system\nBe brief.{END}"
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2 2"},
]


@pytest.fixture
def write(tmp_path):
    """Makes writers of a template, by its text; of none, of data.template."""

    def make(chat=SMOLLM2, **changes):
        make_directory(tmp_path, chat_template=chat, eos_token="<|im_end|>")
        tokenizer = load_tokenizer(tmp_path)
        data = DataConfig(**{"template": "chat", **changes})
        found = read_chat_template(tmp_path) if data.template == "chat" else None
        return tokenizer, Writer(data, tokenizer, found)

    return make


def learned(tokenizer, answer):
    """The text in parts, each with whether it is learned."""
    cuts = np.flatnonzero(np.diff(answer.mask)) + 1
    parts = zip(np.split(answer.tokens, cuts), np.split(answer.mask, cuts), strict=True)
    return [(tokenizer.decode_all(ids.tolist()), bool(on[0])) for ids, on in parts]


def test_every_answer_of_a_chat_is_learned_up_to_its_end(write):
    tokenizer, writer = write()
    assert learned(tokenizer, writer({"messages": TURNS})) == [
        (f"{SYSTEM}{USER}one?{END}{REPLY}", False),
        ("1<|im_end|>", True),
        (f"\n{USER}two?{END}{REPLY}", False),
        ("2 2<|im_end|>", True),
    ]


def test_prompts_and_completions_are_asked_as_in_training(write):
    tokenizer, writer = write(user_template="Q: {question}", system_prompt="Be brief.")
    row = {"question": "one?", "solution": "1"}
    expected = [
        (f"{SYSTEM}{USER}Q: one?{END}{REPLY}", False),
        ("1<|im_end|>", True),
    ]
    assert learned(tokenizer, writer(row)) == expected
    tokenizer, writer = write(template="{question}=")
    (prompt, no), (answer, yes) = learned(tokenizer, writer(row))
    assert (prompt, no, yes) == ("one?=", False, True)
    assert answer == f"1{tokenizer.decode_all([tokenizer.eos_ids[0]])}"
    turns = {"prompt": TURNS[1:2], "completion": TURNS[2:3]}
    assert learned(tokenizer, writer(turns)) == learned(tokenizer, writer(row))


def test_an_earlier_answer_that_the_template_changes_is_read_and_not_learned(write):
    """Qwen3's takes the thinking out of all but the last."""
    tokenizer, writer = write(TEMPLATES["Qwen3"])
    thinking = [dict(turn) for turn in TURNS[1:]]
    thinking[1]["content"] = "<think>\nso\n</think>\n\n1"
    thinking[3]["content"] = "<think>\nhm\n</think>\n\n2"
    assert learned(tokenizer, writer({"messages": thinking})) == [
        (f"{USER}one?{END}{REPLY}1{END}{USER}two?{END}{REPLY}", False),
        ("<think>\nhm\n</think>\n\n2<|im_end|>", True),
    ]


@pytest.mark.parametrize(
    "row, kind, words",
    [
        ({"messages": TURNS[:2]}, Unusable, "no answer of the assistant's"),
        ({"prompt": "one?", "completion": " "}, Unusable, "no answer of the assist"),
        ({"prompt": "one?"}, Malformed, "'completion' or 'response'"),
        ({"prompt": "one?", "answer": 7}, Malformed, "is of type int, not str"),
        ({"prompt": "<image> one?", "answer": "7"}, Unusable, "picture"),
    ],
)
def test_rows_without_an_answer_are_told(write, row, kind, words):
    _, writer = write()
    with pytest.raises(kind, match=words):
        writer(row)


def test_a_chat_of_many_turns_wants_a_template(write):
    _, writer = write(template="{question}")
    with pytest.raises(Unusable, match="data.template must be 'chat'"):
        writer({"messages": TURNS})


def test_broken_rows_are_counted_apart(tmp_path, write):
    _, writer = write()
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n{\n{"prompt": "a"}\n')
    left_out, broken = Tally(), Tally()
    found = list(read_answers(file, writer, left_out=left_out, broken=broken))
    assert (len(found), left_out.total, broken.total) == (1, 0, 2)
    assert broken["broken JSON"]["first"] == "rows.jsonl, line 2"
