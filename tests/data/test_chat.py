"""Prompts from chat templates: those that `transformers` writes, and nothing else."""

import contextlib
import dataclasses
import json
import sys
import time

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_chat import GEMMA_2, MAGISTRAL, SMOLLM2, TEMPLATES, make_directory
from small_model import small_architecture

from scalerl_jax.config import DataConfig
from scalerl_jax.data import chat_process
from scalerl_jax.data.chat import chat_renderer
from scalerl_jax.data.detokenizer import make_marker
from scalerl_jax.data.questions import CHAT, Question, extract_answer, plain_renderer
from scalerl_jax.data.tokenizer import load_tokenizer

# What templates, formats and tokenizers could stumble over.
TEXTS = st.lists(
    st.text()
    | st.sampled_from(
        "{{ 6 * 7 }}|{% raise %}|{#|{question}|{|}|\n|\r\n| |<|im_end|>|<bos>|é漢🤔"
        "|{{ messages }}|</think>|%s|\\n".split("|")
    )
).map("".join)


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request, tmp_path_factory):
    """A template's name, its directory, and the tokenizer of `transformers`."""
    directory = tmp_path_factory.mktemp("model")
    make_directory(directory, chat_template=TEMPLATES[request.param])
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    return request.param, directory, reference


def renderer(directory, **changes):
    values = {
        "template": "chat",
        "system_prompt": "",
        "user_template": "{question}",
        "enable_thinking": True,
    }
    data = DataConfig(**(values | changes))
    if data.template != CHAT:
        return plain_renderer(data.template)
    return chat_renderer(data, directory)


def ask(text, **changes):
    return Question(task="gsm8k", text=text, reference={}, **changes)


@given(text=TEXTS, system=TEXTS, enable_thinking=st.booleans())
@settings(deadline=None, max_examples=30)
def test_text_and_ids_are_those_of_transformers(family, text, system, enable_thinking):
    name, directory, reference = family
    if name == "Gemma 2":
        system = ""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": f"{text}\nIn \\boxed{{}}."})
    expected, ids = (
        reference.apply_chat_template(
            messages,
            tokenize=tokenize,
            add_generation_prompt=True,
            enable_thinking=enable_thinking,
            return_dict=False,
        )
        for tokenize in (False, True)
    )
    render = renderer(
        directory,
        system_prompt=system,
        user_template="{question}\nIn \\boxed{}.",
        enable_thinking=enable_thinking,
    )
    assert render(ask(text)) == expected
    # The tokenizer would write a BOS of its own, beside that of some templates.
    assert load_tokenizer(directory).encode(expected) == ids


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """A directory with its template."""
    return make_directory(tmp_path_factory.mktemp("model"), chat_template=SMOLLM2)


@given(text=TEXTS)
@settings(deadline=None, max_examples=50)
def test_a_question_is_never_evaluated(smollm2, text):
    prompt = renderer(smollm2)(ask(text))
    assert prompt.endswith(
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_plain_template_shows_the_question_and_reads_no_directory():
    render = renderer("missing", template="{a} {question}\n{question}<think>")
    assert render(ask("{question}{b}")) == "{a} {question}{b}\n{question}{b}<think>"
    with pytest.raises(ValueError, match="'gsm8k' .*system message"):
        render(ask("1", system="Be brief."))


def test_the_setting_stands_before_a_data_sets_own_system_message(tmp_path):
    make_directory(tmp_path, chat_template="{{ messages | tojson }}")
    user = {"role": "user", "content": "1"}
    for setting, own, expected in (
        ("", "", None),
        ("", "own", "own"),
        ("set", "own", "set"),
        ("set", "", "set"),
    ):
        render = renderer(tmp_path, system_prompt=setting)
        system = [{"role": "system", "content": expected}] if expected else []
        assert json.loads(render(ask("1", system=own))) == [*system, user]


def test_a_questions_own_tools_are_listed(tmp_path):
    make_directory(tmp_path, chat_template="{{ tools | tojson }}")
    tools = [{"type": "function", "function": {"name": "run"}}]
    question = Question(task="any", text="1", reference={"tools": tools})
    assert json.loads(renderer(tmp_path)(question)) == tools
    assert renderer(tmp_path)(ask("1")) == "null"


def test_a_template_may_lie_beside_the_config_and_then_counts(tmp_path):
    make_directory(tmp_path, chat_template="in the config")
    (tmp_path / "chat_template.jinja").write_text("ça: {{ eos_token }}", "utf-8")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template([{"role": "user"}], tokenize=False)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert renderer(path)(ask("1")) == expected == "ça: <eos>"


def test_the_default_of_named_templates_is_taken(tmp_path):
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ messages[0].content }}!"},
    ]
    make_directory(tmp_path, chat_template=named)
    assert renderer(tmp_path)(ask("1")) == "1!"
    make_directory(tmp_path, chat_template=named[:1])
    with pytest.raises(ValueError, match=r"no 'default' among \['tool_use'\]; write"):
        renderer(tmp_path)


@pytest.mark.parametrize("config", [{}, {"added_tokens_decoder": {}}])
def test_special_tokens_come_from_the_files_that_transformers_reads(tmp_path, config):
    source = (
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ image_token }}|{{ end }}"
    )
    config |= {"image_token": "<i>", "extra_special_tokens": {"end": "<|eot_id|>"}}
    make_directory(tmp_path, chat_template=source, **config)
    old = {"bos_token": {"content": "<|im_start|>"}, "pad_token": "<|im_end|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(old))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template([{"role": "user"}], tokenize=False)
    assert renderer(tmp_path)(ask("1")) == expected


@pytest.mark.parametrize(
    "name, enable_thinking, end",
    [
        ("SmolLM2", True, ""),
        ("Qwen2.5", True, ""),
        ("Llama 3.2", True, ""),
        ("Gemma 2", True, ""),
        ("Qwen3", True, "</think>"),  # it opens its thinking by itself
        ("Qwen3", False, ""),  # the prompt closes an empty one
        ("DeepSeek-R1", True, "</think>"),  # the prompt opens it
        ("DeepSeek-R1", False, "</think>"),  # and knows no switch
        ("Magistral", True, "[/THINK]"),
    ],
)
def test_a_prompt_tells_how_the_thinking_after_it_ends(
    tmp_path, name, enable_thinking, end
):
    make_directory(tmp_path, chat_template=TEMPLATES[name])
    render = renderer(tmp_path, enable_thinking=enable_thinking)
    assert render.end_of_thinking == end
    # What such a model writes, and how a completion is searched for its answer.
    begin = "[THINK]" if name == "Magistral" else "<think>"
    thinking = f"{begin}6 * 7{end}" if end else ""
    tokenizer = load_tokenizer(tmp_path)
    text = tokenizer.decode(tokenizer.encode(f"{thinking}\n\n42<|im_end|>"))
    assert extract_answer(text, answer_after=render.end_of_thinking) == "42"
    if end:
        cut = tokenizer.decode(tokenizer.encode(f"{begin}6 * 7 is 42"))
        assert extract_answer(cut, answer_after=render.end_of_thinking) is None


def test_gpt_oss_s_answer_is_in_its_final_channel(tmp_path):
    make_directory(tmp_path, chat_template=TEMPLATES["gpt-oss"])
    render = renderer(tmp_path)
    assert render(ask("6 * 7")).endswith("6 * 7<|end|><|start|>assistant")
    after, tokenizer = render.end_of_thinking, load_tokenizer(tmp_path)
    assert after == "<|channel|>final<|message|>"
    begin, end = "<|channel|>analysis<|message|>6 by 7", "<|end|><|start|>assistant"
    marker = make_marker(after, tokenizer.shown, vocabulary=tokenizer.vocab_size)
    for text, answer in (
        (f"{begin}{end}{after} 42<|return|>", "42"),
        (f"{after}42<|return|>", "42"),  # without thinking
        (f"{begin} is final", None),  # cut off
        (f"{begin}{end}<|channel|>final", None),
    ):
        ids = tokenizer.encode(text)
        found = extract_answer(tokenizer.decode(ids), answer_after=after)
        assert found == answer
        assert (marker.state(ids) == marker.ended) == (answer is not None)
    opened = renderer("", template="{question}" + begin.removesuffix("6 by 7"))
    assert opened.end_of_thinking == after
    closed = renderer("", template="{question}" + after)
    assert closed.end_of_thinking == ""
    with pytest.raises(ValueError, match=r"calls of tools .*'<\|call\|>'"):
        render(dataclasses.replace(ask("1"), reference={"tools": [{"type": "x"}]}))


def test_a_plain_template_tells_it_too():
    assert renderer("", template="{question}<think>").end_of_thinking == "</think>"
    assert renderer("", template="{question}[THINK]\n").end_of_thinking == "[/THINK]"
    assert renderer("", template="Q: {question}\nA:").end_of_thinking == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ (messages | attr('__class__')).__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': ''}) }}",
        "{{ dict.update(messages[0], {'content': ''}) }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(tmp_path, source):
    make_directory(tmp_path, chat_template=source)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json fails: \w+Error: "):
        renderer(tmp_path)


@pytest.mark.parametrize(
    "source, why",
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}"
            "{% endfor %}{% endfor %}",
            "takes longer than 1 s",
        ),
        ("{{ 'x' * 10 ** 10 }}", "MemoryError"),
        ("{{ '%09999999d' % 1 }}", "writes more than 4,194,304 characters"),
        ("{#" + "x" * 2**22 + "#}", "has more than 4,194,304 characters"),
    ],
)
def test_a_template_has_little_time_and_memory(tmp_path, monkeypatch, source, why):
    monkeypatch.setattr(chat_process, "TIMEOUT_S", 1.0)
    make_directory(tmp_path, chat_template=source)
    started = time.monotonic()
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json fails: .*{why}"):
        renderer(tmp_path)
    assert time.monotonic() - started < 30.0
    make_directory(tmp_path, chat_template="{{ messages[0]['content'] }}!")
    assert renderer(tmp_path)(ask("Well")) == "Well!"  # the next one has a process


@pytest.mark.parametrize(
    "source, kind",
    [
        ("{{ raise_exception('x' * 9999) }}", "refused"),
        ("{{ raise_exception(messages) }}", "refused"),
        ("{{ dict(a=1)['x' * 9999].b }}", "failed"),
        ("{% " + "x" * 9999 + " %}", "syntax"),
    ],
)
def test_a_template_s_own_error_is_short(source, kind):
    with contextlib.closing(chat_process.TemplateProcess()) as process:
        reply = process.render(source, {"messages": [{"content": "x" * 9999}]})
    assert reply.keys() == {kind} and len(reply[kind]) == 500


@pytest.mark.parametrize(
    "module, name, value, why",
    [
        (chat_process, "_START_TIMEOUT_S", 0.0, "no line within 0.0 s"),
        (sys, "executable", "/no/such/python", "No such file or directory"),
    ],
)
def test_a_process_that_does_not_start_is_a_reason_and_the_next_one_serves(
    module, name, value, why
):
    with contextlib.closing(chat_process.TemplateProcess()) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, value)
            reply = process.render("{{ 6 * 7 }}", {})
        assert reply.keys() == {"unstarted"} and why in reply["unstarted"]
        assert process.render("{{ 6 * 7 }}", {}) == {"text": "42"}


@pytest.mark.parametrize(
    "config, changes, message",
    [
        ({}, {}, "no file chat_template.jinja"),
        ({"chat_template": 7}, {}, "'chat_template' .* a text or a list"),
        ({"chat_template": ["x"]}, {}, "objects with 'name'"),
        (
            {"chat_template": "a\n{% if %}"},
            {},
            r"tokenizer_config\.json is no .*: line 2: ",
        ),
        (
            {"chat_template": "{{ tool_list[0] }}"},
            {},
            "UndefinedError: 'tool_list'",
        ),
        ({"chat_template": "{{ 1 + 'a' }}"}, {}, r"fails: TypeError: "),
        (
            {"chat_template": GEMMA_2},
            {"system_prompt": "Be brief."},
            "'system' and 'user': .*data.system_prompt",
        ),
        (
            {"chat_template": MAGISTRAL},
            {"user_template": "Q"},
            "data.user_template = 'Q'",
        ),
        ({}, {"template": "Q"}, "data.template = 'Q'"),
    ],
)
def test_what_is_wrong_with_a_template_is_said(tmp_path, config, changes, message):
    make_directory(tmp_path, **config)
    with pytest.raises(ValueError, match=message):
        renderer(tmp_path, **changes)


def test_a_template_in_another_encoding_is_named(tmp_path):
    make_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8"):
        renderer(tmp_path)


def test_a_gguf_file_brings_its_template(tmp_path):
    pytest.importorskip("gguf")
    from small_gguf import write_gguf

    def write(**more):
        names = {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "b", "ab", "<eos>"]}
        names |= {"token_type": [1, 1, 1, 3], "merges": ["a b"], "eos_token_id": 3}
        metadata = {f"tokenizer.ggml.{name}": value for name, value in names.items()}
        path = tmp_path / "model.gguf"
        write_gguf(path, small_architecture(), {}, metadata=metadata | more)
        return path

    source = "{{ messages[0].content }}{{ eos_token }}"
    path = write(**{"tokenizer.chat_template": source})
    assert renderer(path)(ask("1")) == "1<eos>"
    with pytest.raises(ValueError, match=r"model\.gguf has no chat template"):
        renderer(write())
