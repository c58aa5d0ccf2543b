"""Where the answer stands in a completion, by how the policy thinks."""

import logging

import pytest
import small_run
from small_chat import TEMPLATES, make_directory
from small_model import small_architecture

from scalerl_jax.config import Config, DataConfig, InterruptionConfig
from scalerl_jax.wiring.prompts import answer_after, make_render
from scalerl_jax.wiring.sampling import make_tokenizer
from scalerl_jax.wiring.thinking import check_phrase, check_thinking, why_no_answers


def check(config):
    check_thinking(config, make_render(config))


@pytest.fixture
def configure(tmp_path):
    """A config for a chat model: its template, and settings of `data`."""

    def configure(name, interruption=None, **data):
        make_directory(tmp_path, chat_template=TEMPLATES[name])
        return Config(
            data=DataConfig(
                **({"template": "chat", "tokenizer": str(tmp_path)} | data)
            ),
            interruption=interruption or InterruptionConfig(enabled=False),
        )

    return configure


@pytest.mark.parametrize(
    "name, data, expected",
    [
        ("Qwen3", {"answer_after": "auto"}, "</think>"),
        ("Qwen3", {"answer_after": "auto", "enable_thinking": False}, ""),
        ("Qwen2.5", {"answer_after": "auto"}, ""),
        ("Magistral", {"answer_after": "auto"}, "[/THINK]"),
        ("Qwen2.5", {"answer_after": "####"}, "####"),
        ("Qwen3", {"answer_after": ""}, ""),
        ("Qwen3", {"answer_after": "auto", "template": "{question}"}, ""),
        (
            "Qwen2.5",
            {"answer_after": "auto", "template": "{question}<think>"},
            "</think>",
        ),
    ],
)
def test_the_answer_follows_the_thinking_if_there_is_any(
    configure, name, data, expected
):
    config = configure(name, **data)
    check(config)
    assert answer_after(config) == expected


def test_an_answer_after_a_thinking_that_the_prompt_closes_is_refused(configure):
    config = configure("Qwen3", enable_thinking=False)
    with pytest.raises(
        ValueError,
        match="data.answer_after = '</think>' is .*= False",
    ):
        check(config)


def test_a_tag_that_nothing_asks_for_is_warned_of(configure, caplog):
    with caplog.at_level(logging.WARNING):
        check(configure("Qwen2.5", system_prompt="Think, </think>, answer."))
        check(configure("Qwen3"))
        assert not caplog.text
        check(configure("Qwen2.5"))
    assert "data.answer_after = '</think>' is neither in the template" in caplog.text


def test_an_interruption_needs_a_thinking_with_its_own_tag(configure):
    think = InterruptionConfig(enabled=True)
    check(configure("Qwen3", think, answer_after="auto"))
    check(configure("Qwen3", think, answer_after=""))
    check(configure("Qwen2.5", think))  # the user says that it thinks
    for name, data in (
        ("Qwen2.5", {"answer_after": "auto"}),
        ("Qwen2.5", {"answer_after": ""}),
        ("Qwen3", {"answer_after": "auto", "enable_thinking": False}),
    ):
        with pytest.raises(
            ValueError,
            match="interruption.enabled = True .*= 'chat'",
        ):
            check(configure(name, think, **data))
    for name in ("Magistral", "gpt-oss"):
        with pytest.raises(
            ValueError, match=r"interruption\.end_of_thinking = '</think>'"
        ):
            check(configure(name, think, answer_after="auto"))
    final = "<|channel|>final<|message|>"
    phrase = f"Time is up.<|end|><|start|>assistant{final}"
    own = InterruptionConfig(enabled=True, phrase=phrase, end_of_thinking=final)
    config = configure("gpt-oss", own, answer_after="auto")
    check(config)
    arch = small_architecture(vocab_size=512)
    tokenizer = make_tokenizer(config, arch)
    check_phrase(config, tokenizer)
    assert tokenizer.encode(phrase)[-1] == tokenizer.backend.token_to_id("<|message|>")


def test_a_template_that_writes_todays_date_is_warned_of(configure, caplog):
    with caplog.at_level(logging.WARNING):
        check(configure("Llama 3.1", answer_after="auto"))
        assert not caplog.text
        check(configure("Llama 3.2", answer_after="auto"))
    assert "prompts of another day differ" in caplog.text


def test_a_phrase_whose_end_has_no_tokens_is_refused():
    end = {"interruption.end_of_thinking": "</thiñk>"}
    for phrase, accepted in (("time is up.</think>", True), ("up.</thiñk>", False)):
        changes = {"interruption.phrase": phrase} | ({} if accepted else end)
        config = small_run.make_config(changes)
        tokenizer = make_tokenizer(config, small_architecture(vocab_size=100))
        if accepted:
            check_phrase(config, tokenizer)
            continue
        with pytest.raises(
            ValueError,
            match=r"interruption\.phrase = 'up\.</thiñk>'",
        ):
            check_phrase(config, tokenizer)


@pytest.mark.parametrize("after", ["<|eot_id|>", "<|im_start|>final<|im_end|>"])
def test_an_answer_may_follow_special_tokens(configure, after):
    config = configure("Qwen2.5", answer_after=after)
    tokenizer = make_tokenizer(config, small_architecture(vocab_size=300))
    ids = tokenizer.encode(f"<bos>6 * 7{after}<eos>42<eos>")
    assert tokenizer.decode(ids) == f"6 * 7{after}42"
    start = tokenizer.answer_start(ids, answer_after=after)
    assert tokenizer.decode_all(ids)[start:] == "<eos>42<eos>"
    assert tokenizer.answer_start(ids[:5], answer_after=after) is None
    assert tokenizer.answer_start(ids, answer_after="") == 0


@pytest.mark.parametrize(
    "name, data, advice",
    [
        pytest.param(
            "Qwen2.5",
            {"template": "{question}<think>"},
            "data.template = '{question}<think>'",
            id="a chat model is asked without its template",
        ),
        pytest.param(
            "Qwen2.5",
            {"answer_after": "####"},
            "data.answer_after = '####'",
            id="a mark that the model does not write",
        ),
        pytest.param(
            "Qwen3",
            {"answer_after": "auto"},
            "'</think>' (data.answer_after = 'auto')",
            id="a thinking that does not end",
        ),
        pytest.param(
            "Qwen2.5",
            {"answer_after": "auto"},
            "reward.math_answer = 'boxed' to another of boxed, last_number, boxed_",
            id="no form that a verdict knows",
        ),
    ],
)
def test_completions_without_answers_are_told_the_setting(
    configure, name, data, advice
):
    assert advice in why_no_answers(configure(name, **data))


def test_a_base_model_is_not_told_to_chat(tmp_path):
    make_directory(tmp_path)
    config = Config(data=DataConfig(tokenizer=str(tmp_path)))
    assert "chat" not in why_no_answers(config)
