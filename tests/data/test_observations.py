"""What stands between two turns: frames of chat templates, and texts of others."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_chat import SPECIAL, TEMPLATES, THINK, make_backend, make_directory

from scalerl_jax.data.chat import read_chat_template
from scalerl_jax.data.observations import (
    ObservationWriter,
    chat_framing,
    plain_framing,
)
from scalerl_jax.data.tokenizer import Tokenizer

BACKEND = make_backend()
IDS = {name: BACKEND.token_to_id(name) for name in (*SPECIAL, *THINK)}


def tokenizer(*ends):
    return Tokenizer(backend=BACKEND, eos_ids=tuple(IDS[end] for end in ends))


def framing(tmp_path, name, **options):
    make_directory(tmp_path, chat_template=TEMPLATES[name])
    return chat_framing(read_chat_template(tmp_path), options)


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


def test_a_template_that_has_no_such_conversation_is_refused(tmp_path):
    with pytest.raises(ValueError, match="refuses .*; an environment's observation"):
        framing(tmp_path, "Magistral")("user")
    with pytest.raises(ValueError, match="a message of the role 'tool'"):
        framing(tmp_path, "Qwen3")("tool")


WRITER = ObservationWriter(tokenizer("<eos>"), plain_framing("<think>{observation}"))


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
