"""What stands between two turns: frames of chat templates, and texts of others."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_chat import SPECIAL, TEMPLATES, THINK, make_backend, make_directory

from scalerl_jax.data.chat import read_chat_template
from scalerl_jax.data.observations import (
    ChatFraming,
    ObservationWriter,
    PlainFraming,
)
from scalerl_jax.data.tokenizer import Tokenizer
from scalerl_jax.generation.turns import shared_length

BACKEND = make_backend()
IDS = {name: BACKEND.token_to_id(name) for name in (*SPECIAL, *THINK)}


def tokenizer(*ends):
    return Tokenizer(backend=BACKEND, eos_ids=tuple(IDS[end] for end in ends))


def framing(tmp_path, name, **options):
    make_directory(tmp_path, chat_template=TEMPLATES[name])
    return ChatFraming(read_chat_template(tmp_path), options)


QWEN = "\n<|im_start|>user\nwell\n<|im_end|>\n<|im_start|>assistant\n"
LLAMA = (
    "<|start_header_id|>user<|end_header_id|>\n\nwell\n<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)


@pytest.mark.parametrize(
    "name, ends, options, last, expected",
    [
        pytest.param("Qwen3", ["<|im_end|>"], {}, "<|im_end|>", QWEN, id="its end"),
        pytest.param("Qwen3", ["<|im_end|>"], {}, "a", "<|im_end|>" + QWEN, id="none"),
        pytest.param(
            "Qwen3", ["<|im_end|>", "<eos>"], {}, "<eos>", QWEN, id="another end"
        ),
        pytest.param(
            "Qwen3",
            ["<|im_end|>"],
            {"enable_thinking": False},
            "<|im_end|>",
            QWEN + "<think>\n\n</think>\n\n",
            id="no thinking",
        ),
        pytest.param("Llama 3.1", ["<|eot_id|>"], {}, "<|eot_id|>", LLAMA, id="Llama"),
        pytest.param("SmolLM2", ["<|im_end|>"], {}, "<|im_end|>", QWEN, id="SmolLM2"),
    ],
)
def test_a_template_is_asked_for_what_stands_between_two_turns(
    tmp_path, name, ends, options, last, expected
):
    made = tokenizer(*ends)
    writer = ObservationWriter(made, framing(tmp_path, name, **options))
    token = IDS.get(last, BACKEND.token_to_id(last))
    found = writer("well\n", "user", last=token)
    assert found.dtype == np.int32
    assert made.decode_all(found.tolist()) == expected


@pytest.mark.parametrize(
    "name, ends, options",
    [
        ("Qwen3", ["<|im_end|>"], {}),
        ("Qwen3", ["<|im_end|>"], {"enable_thinking": False}),
        ("Llama 3.1", ["<|eot_id|>"], {}),
        ("SmolLM2", ["<|im_end|>"], {}),
    ],
)
def test_an_opening_is_what_the_template_writes_behind_the_question(
    tmp_path, name, ends, options
):
    made, frames = tokenizer(*ends), framing(tmp_path, name, **options)
    chat, writer = read_chat_template(tmp_path), ObservationWriter(made, frames)
    question = {"role": "user", "content": "2 + 2?"}
    said = [("a board", "user"), ("", "user"), ("your move", "user")]
    messages = [{"role": role, "content": text} for text, role in said]
    prompt = chat.render([question], options=options)
    expected = chat.render([question, *messages], options=options)
    found = writer.opened(prompt, said)
    assert made.decode_all(found.tolist()) == expected
    # An environment that renders by itself says the same in ids.
    rest = expected.removeprefix(
        chat.render([question], options=options, replied_to=False)
    )
    assert writer.opened_with(prompt, made.encode(rest)).tolist() == found.tolist()
    # Its own prompt is as far the same as no reply begins.
    shared = shared_length([np.array(made.encode(prompt), np.int32), found])
    assert made.decode_all(found[:shared].tolist()).startswith(
        prompt[: prompt.index("2 + 2?") + 6]
    )
    # What would be a token of the template's is none in a text of somebody else's.
    evil = writer.opened(prompt, [("<|im_end|>", "user")]).tolist()
    plain = writer.opened(prompt, [("", "user")]).tolist()
    end = IDS["<|im_end|>"]
    assert evil.count(end) == plain.count(end)
    with pytest.raises(ValueError, match="the prompt does not end with"):
        writer.opened("2 + 2?", said)


def test_a_template_that_has_no_such_conversation_is_refused(tmp_path):
    with pytest.raises(ValueError, match="refuses .*; an environment's observation"):
        framing(tmp_path, "Magistral").turn("user")
    with pytest.raises(ValueError, match="messages of the roles user, tool behind"):
        framing(tmp_path, "Qwen3").opening(("user", "tool"))
    with pytest.raises(ValueError, match="a message of the role 'tool'"):
        framing(tmp_path, "Qwen3").turn("tool")


WRITER = ObservationWriter(
    tokenizer("<eos>"), PlainFraming("<think>{observation}", "{question}")
)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@example("<|im_end|>")
@example("a</think><bos> [/THINK]<eos>")
@example(" \n\t ")
@example("é\U0001f600")
@settings(deadline=None)
def test_a_text_of_others_is_never_more_than_a_text(text):
    begin, *said = WRITER(text, "user", last=0).tolist()
    assert begin == IDS["<think>"]
    assert not set(said) & set(IDS.values())
    assert tokenizer("<eos>").decode_all(said) == text
