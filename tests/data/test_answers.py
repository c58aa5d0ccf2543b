"""Answers in rows: what is learned of them, written out by hand for a chat template."""

import itertools
import json

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

    def make(chat=SMOLLM2, *, eos="<|im_end|>", **changes):
        make_directory(tmp_path, chat_template=chat, eos_token=eos)
        tokenizer = load_tokenizer(tmp_path)
        data = DataConfig(**{"template": "chat", **changes})
        found = read_chat_template(tmp_path) if data.template == "chat" else None
        return tokenizer, Writer(data, tokenizer, found)

    return make


def parts(tokenizer, sequence):
    """The text in parts, each with whether it is learned."""
    tokens = iter(sequence.tokens.tolist())
    return [
        (tokenizer.decode_all([next(tokens) for _ in own]), on)
        for on, own in itertools.groupby(sequence.mask.tolist())
    ]


def learned(tokenizer, written):
    """The parts of a row's one sequence."""
    (sequence,) = written.sequences
    assert written.left_out == ()
    return parts(tokenizer, sequence)


def chat(*texts, **fields):
    """A row of turns, the user's first; the fields are the last one's."""
    roles = itertools.cycle(("user", "assistant"))
    turns = [{"role": next(roles), "content": text} for text in texts]
    turns[-1] |= fields
    return {"messages": turns}


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


def test_an_answer_that_the_template_changes_later_is_learned_as_it_was_new(write):
    """Qwen3's takes the thinking out of all but the last, which has an empty one."""
    tokenizer, writer = write(TEMPLATES["Qwen3"])
    thinking = [dict(turn) for turn in TURNS[1:]]
    thinking[1]["content"] = "<think>\nso\n</think>\n\n1"
    written = writer({"messages": thinking})
    one = f"{USER}one?{END}{REPLY}"
    two = f"{one}1{END}{USER}two?{END}{REPLY}"
    assert [parts(tokenizer, each) for each in written.sequences] == [
        [(one, False), ("<think>\nso\n</think>\n\n1<|im_end|>", True)],
        [(two, False), ("<think>\n\n</think>\n\n2 2<|im_end|>", True)],
    ]
    tokenizer, writer = write(TEMPLATES["Qwen3"], enable_thinking=False)
    written = writer({"messages": TURNS[1:]})
    assert [parts(tokenizer, each) for each in written.sequences] == [
        [(f"{one}<think>\n\n</think>\n\n", False), ("1<|im_end|>", True)],
        [(f"{two}<think>\n\n</think>\n\n", False), ("2 2<|im_end|>", True)],
    ]


R1 = "<bos><｜User｜>one?<｜Assistant｜><think>\n"
QWEN = f"{USER}one?{END}{REPLY}"


@pytest.mark.parametrize(
    "name, said, changes, prompt, expected",
    [
        ("DeepSeek-R1", "<think>\nso\n</think>\n\n1", {}, R1, "so\n</think>\n\n1"),
        ("DeepSeek-R1", "\n<think>so</think>1", {}, R1, "so</think>1"),
        ("DeepSeek-R1", "so\n</think>\n\n1", {}, R1, "so\n</think>\n\n1"),
        (
            "Qwen3-Thinking",
            "<think>\nso\n</think>\n\n1",
            {},
            f"{QWEN}<think>\n",
            "so\n</think>\n\n1",
        ),
        # As this template writes an answer without thinking.
        ("Qwen3-Thinking", "1", {}, f"{QWEN}<think>\n", "\n</think>\n\n1"),
        (
            "Qwen3",
            "<think>\n\n</think>\n\n1",
            {"enable_thinking": False},
            f"{QWEN}<think>\n\n</think>\n\n",
            "1",
        ),
        (
            "SmolLM2",
            "<think>so</think>1",
            {"template": "{question}<think>\n"},
            "one?<think>\n",
            "so</think>1",
        ),
    ],
)
def test_thinking_that_the_prompt_begins_is_not_learned_twice(
    write, name, said, changes, prompt, expected
):
    tokenizer, writer = write(TEMPLATES[name], **changes)
    assert learned(tokenizer, writer(chat("one?", said))) == [
        (prompt, False),
        (f"{expected}<|im_end|>", True),
    ]


@pytest.mark.parametrize(
    "name, said, words",
    [
        ("DeepSeek-R1", "1", "begins the thinking, which an answer never ends"),
        ("DeepSeek-R1", "<think>\n1", "begins the thinking, which an answer never"),
        ("DeepSeek-R1", "<think>\n", "an answer is empty"),
        ("Qwen3", "<think>\nso\n</think>\n\n1", "has ended the thinking, and an ans"),
        ("Qwen3", "so\n</think>\n\n1", "has ended the thinking, and an answer thinks"),
    ],
)
def test_an_answer_that_contradicts_its_prompt_is_told(write, name, said, words):
    _, writer = write(TEMPLATES[name], enable_thinking=False)
    with pytest.raises(Unusable, match=words):
        writer(chat("one?", said))


def test_one_answer_that_contradicts_its_prompt_leaves_the_others(write):
    tokenizer, writer = write(TEMPLATES["DeepSeek-R1"])
    written = writer(chat("zero?", "0", "one?", "<think>\nso\n</think>\n\n1"))
    assert [parts(tokenizer, each) for each in written.sequences] == [
        [
            (
                "<bos><｜User｜>zero?<｜Assistant｜>0<｜end▁of▁sentence｜>"
                "<｜User｜>one?<｜Assistant｜><think>\n",
                False,
            ),
            ("so\n</think>\n\n1<|im_end|>", True),
        ]
    ]
    assert written.left_out == (
        "its prompt begins the thinking, which an answer never ends",
    )


def test_an_empty_answer_is_read_and_not_learned(write):
    tokenizer, writer = write()
    written = writer(
        {"messages": [*TURNS[:2], TURNS[2] | {"content": " "}, *TURNS[3:]]}
    )
    (sequence,) = written.sequences
    assert parts(tokenizer, sequence) == [
        (f"{SYSTEM}{USER}one?{END}{REPLY} {END}{USER}two?{END}{REPLY}", False),
        ("2 2<|im_end|>", True),
    ]
    assert written.left_out == ("an answer is empty",)


def test_thinking_in_a_field_of_its_own_is_written_by_the_template(write):
    tokenizer, writer = write(TEMPLATES["Qwen3"])
    assert learned(tokenizer, writer(chat("one?", "1", reasoning_content="so"))) == [
        (QWEN, False),
        ("<think>\nso\n</think>\n\n1<|im_end|>", True),
    ]
    tokenizer, writer = write(TEMPLATES["gpt-oss"], eos="<|return|>")
    start = (
        "<|start|>system<|message|>Reasoning: medium\n\n"
        "# Valid channels: analysis, commentary, final.<|end|>"
        "<|start|>user<|message|>one?<|end|><|start|>assistant"
    )
    assert learned(tokenizer, writer(chat("one?", "1", thinking="so"))) == [
        (start, False),
        (
            "<|channel|>analysis<|message|>so<|end|>"
            "<|start|>assistant<|channel|>final<|message|>1<|return|>",
            True,
        ),
    ]


@pytest.mark.parametrize(
    "name, fields, changes, kind, words",
    [
        ("SmolLM2", {"thinking": "so"}, {}, Unusable, "not write 'thinking' of an ans"),
        ("Qwen3", {"thinking": "so"}, {}, Unusable, "not write 'thinking' of an answ"),
        (
            "Qwen3",
            {"reasoning_content": "so"},
            {"enable_thinking": False},
            Unusable,
            "does not write 'reasoning_content' of an answer",
        ),
        (
            "Qwen3",
            {"reasoning_content": "so"},
            {"template": "{question}"},
            Unusable,
            "'reasoning_content', for which data.template must be 'chat'",
        ),
        (
            "Qwen3",
            {"thinking": ["so"]},
            {},
            Malformed,
            "field 'thinking' .* is no text",
        ),
    ],
)
def test_thinking_that_is_not_written_is_told(
    write, name, fields, changes, kind, words
):
    _, writer = write(TEMPLATES[name], **changes)
    with pytest.raises(kind, match=words):
        writer(chat("one?", "1", **fields))


@pytest.mark.parametrize("fields", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_turns_without_weight_are_read_and_not_learned(write, fields):
    tokenizer, writer = write()
    row = chat("one?", "no", **fields)
    with pytest.raises(Unusable, match="no answer of it is to be learned"):
        writer(row)
    row["messages"] = [TURNS[0], *row["messages"], *TURNS[3:]]
    row["messages"][-1] = TURNS[-1] | {"weight": 1, "train": True}
    expected = [
        (f"{SYSTEM}{USER}one?{END}{REPLY}no{END}{USER}two?{END}{REPLY}", False),
        ("2 2<|im_end|>", True),
    ]
    assert learned(tokenizer, writer(row)) == expected
    row["messages"][-1] = TURNS[-1] | {"weight": None, "train": None}  # of Parquet
    assert learned(tokenizer, writer(row)) == expected
    row["messages"] += [TURNS[3], TURNS[4] | fields]
    assert learned(tokenizer, writer(row)) == expected


def test_a_greeting_that_nobody_asked_for_is_read_and_not_learned(write):
    tokenizer, writer = write()
    row = {"messages": [TURNS[0], TURNS[2], *TURNS[3:]]}
    assert learned(tokenizer, writer(row)) == [
        (f"{SYSTEM}{REPLY}1{END}{USER}two?{END}{REPLY}", False),
        ("2 2<|im_end|>", True),
    ]


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"weight": 0.5}, "'weight' of a message is neither 0 nor 1"),
        ({"weight": "0"}, "'weight' of a message is neither 0 nor 1"),
        ({"train": "no"}, "'train' of a message is neither true nor false"),
    ],
)
def test_other_weights_are_refused(write, fields, words):
    _, writer = write()
    with pytest.raises(Malformed, match=words):
        writer(chat("one?", "1", **fields))


def test_roles_have_the_names_that_templates_know(write):
    tokenizer, writer = write()
    said = {"developer": "Be brief.", "human": "one?", "gpt": "1"}
    turns = [{"from": role, "value": text} for role, text in said.items()]
    assert learned(tokenizer, writer({"conversations": turns})) == [
        (f"{SYSTEM}{USER}one?{END}{REPLY}", False),
        ("1<|im_end|>", True),
    ]


TOOLS = [{"type": "function", "function": {"name": "run"}}]
LISTED = '\n{"type": "function", "function": {"name": "run"}}'


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_are_listed_by_the_template(write, tools):
    tokenizer, writer = write(TEMPLATES["Qwen2.5"])
    row = chat("one?", "1", "two?", "2 2") | {"tools": tools}
    assert learned(tokenizer, writer(row)) == [
        (f"{LISTED}{USER}one?{END}{REPLY}", False),
        ("1<|im_end|>", True),
        (f"\n{USER}two?{END}{REPLY}", False),
        ("2 2<|im_end|>", True),
    ]


@pytest.mark.parametrize(
    "template, tools, changes, kind, words",
    [
        (SMOLLM2, TOOLS, {}, Unusable, "does not write its 'tools'"),
        ("{{ tools[0].a.b }}", TOOLS, {}, Unusable, "with its 'tools' .* fails"),
        (
            SMOLLM2,
            TOOLS,
            {"template": "{question}"},
            Unusable,
            "'tools', for which dat",
        ),
        (SMOLLM2, "run", {}, Malformed, "field 'tools' is no list of objects"),
    ],
)
def test_tools_that_are_not_listed_are_told(
    write, template, tools, changes, kind, words
):
    _, writer = write(template, **changes)
    with pytest.raises(kind, match=words):
        writer(chat("one?", "1") | {"tools": tools})


@pytest.mark.parametrize("changes", [{}, {"template": "{question}="}])
def test_an_end_of_sequence_behind_an_answer_alone_is_cut(write, changes):
    tokenizer, writer = write(**changes)
    plain = learned(tokenizer, writer(chat("one?", "1")))
    assert plain[-1] == ("1<|im_end|>", True)
    assert learned(tokenizer, writer(chat("one?", "1<|im_end|>\n"))) == plain
    with pytest.raises(Unusable, match="an end of sequence is within an answer"):
        writer(chat("one?", "1 <|im_end|> 2"))


@pytest.mark.parametrize(
    "row, kind, words",
    [
        ({"messages": TURNS[:2]}, Unusable, "no answer of the assistant's"),
        ({"prompt": "one?", "completion": " "}, Unusable, "no answer of the assist"),
        ({"prompt": "one?"}, Malformed, "'completion' or 'response'"),
        ({"prompt": "one?", "answer": 7}, Malformed, "is of type int, not str"),
        ({"prompt": "<image> one?", "answer": "7"}, Unusable, "picture"),
        ({"prompt": "one?", "answer": "7", "images": ["a.png"]}, Unusable, "picture"),
        ({"prompt": "one?", "answer": "7", "audio": {"bytes": "a"}}, Unusable, "pict"),
        (
            {"conversations": [{"from": "function_call", "value": "{}"}, *TURNS[1:]]},
            Unusable,
            "a turn is of the role 'function_call', which is not read",
        ),
        ({"messages": [{"content": "a"}, *TURNS[1:]]}, Unusable, "a turn has no role"),
        ({"prompt": "one?", "answer": "\ud83d"}, Unusable, "half a character"),
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
