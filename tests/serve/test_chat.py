"""Chats, as OpenAI's own client sees them, and what a template is given."""

import json
import sys

import openai
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_server import BASE, TEMPLATE

from scalerl_jax.data import chat as templates
from scalerl_jax.data.chat import ChatTemplate
from scalerl_jax.data.chat_process import TemplateProcess
from scalerl_jax.data.tokenizer import Tokenizer, load_tokenizer
from scalerl_jax.serve.fields import ApiError, ChatFields, CompletionFields
from scalerl_jax.serve.orders import BodyReader, Served

WORD = [{"role": "user", "content": "hello"}]
PROMPT = "Spell this word backward (example: sun -> nus): hello<think>"
TOKENIZER = load_tokenizer(BASE)


@pytest.fixture(scope="module")
def client(server):
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def chat(client, server):
    def chat(messages=WORD, **options):
        options = {"max_completion_tokens": 64, "seed": 5} | options
        return client.chat.completions.create(
            model=server.model.name, messages=messages, **options
        )

    return chat


@pytest.fixture(scope="module")
def complete(client, server):
    def complete(**options):
        options = {"max_tokens": 64, "seed": 5} | options
        return client.completions.create(
            model=server.model.name, prompt=PROMPT, **options
        )

    return complete


def test_a_chat_is_the_completion_of_its_template(chat, complete):
    found, expected = (
        chat(n=3, logprobs=True, top_logprobs=2),
        complete(n=3, logprobs=2),
    )
    assert (found.object, found.id[:9]) == ("chat.completion", "chatcmpl-")
    assert found.usage == expected.usage
    for choice, other in zip(found.choices, expected.choices, strict=True):
        assert choice.message.role == "assistant"
        assert choice.message.content == other.text
        assert choice.message.refusal is None and choice.message.tool_calls is None
        assert (choice.index, choice.finish_reason) == (
            other.index,
            other.finish_reason,
        )
        rows, theirs = choice.logprobs.content, other.logprobs
        assert [row.token for row in rows] == theirs.tokens
        assert [row.logprob for row in rows] == theirs.token_logprobs
        for row, likeliest in zip(rows, theirs.top_logprobs, strict=True):
            assert bytes(row.bytes).decode() == row.token
            tops = {top.token: top.logprob for top in row.top_logprobs}
            assert len(tops) == 2 and tops.keys() <= likeliest.keys()
            assert tops.get(row.token, row.logprob) == pytest.approx(
                row.logprob, abs=1e-4
            )
    assert chat().choices[0].logprobs is None
    assert chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"stop": ["l", "th"]}, id="with stop strings"),
        pytest.param({"logprobs": True, "top_logprobs": 1}, id="with logprobs"),
        pytest.param({"max_tokens": 6}, id="cut"),
    ],
)
def test_a_stream_adds_up_to_the_whole(chat, options):
    if "max_tokens" in options:
        options |= {"max_completion_tokens": None}
    whole = chat(n=3, **options)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = list(chat(n=3, **options, **more))
    assert last.choices == [] and last.usage == whole.usage
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    for expected in whole.choices:
        own = [chunk.choices[0] for chunk in chunks]
        parts = [part for part in own if part.index == expected.index]
        roles = [part.delta.role for part in parts]
        assert roles == ["assistant"] + [None] * (len(parts) - 1)
        text = "".join(part.delta.content or "" for part in parts)
        assert text == expected.message.content
        ends = [part.finish_reason for part in parts]
        assert ends == [None] * (len(parts) - 1) + [expected.finish_reason]
        rows = [
            each.logprobs and each.logprobs.content for each in (parts[-1], expected)
        ]
        if rows[1]:
            first, second = ([row.token for row in part] for part in rows)
            assert first == second


def test_without_a_limit_a_chat_may_be_as_long_as_any(chat, complete):
    found = chat(max_completion_tokens=None)
    assert found.choices[0].message.content == complete().choices[0].text


def test_tokens_are_those_that_a_request_would_use(client, chat, server):
    def tokenize(**body):
        code, answer = server.ask("/tokenize", body)
        assert code == 200 and answer["max_model_len"] == 32 + 64, answer
        assert answer["count"] == len(answer["tokens"])
        return answer["tokens"]

    assert tokenize(messages=WORD) == TOKENIZER.encode(PROMPT)
    assert tokenize(prompt=PROMPT) == TOKENIZER.encode(PROMPT)
    assert tokenize(prompt="") == []
    assert chat().usage.prompt_tokens == len(TOKENIZER.encode(PROMPT))
    code, answer = server.ask("/tokenize", {"prompt": "a", "messages": WORD})
    assert code == 400 and "not both" in answer["error"]["message"]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "spell", "parameters": {}}}
# What the template makes of messages and options, less the words of its own.
WRITTEN = [
    pytest.param({}, "S: hello<think>", id="plain"),
    pytest.param({"tools": [TOOL, TOOL]}, "spell;spell;S: hello<think>", id="tools"),
    pytest.param(
        {"tools": [TOOL], "tool_choice": "none"}, "S: hello<think>", id="no tool wanted"
    ),
    pytest.param(
        {"parallel_tool_calls": False, "metadata": {"a": "b"}, "user": "me"},
        "S: hello<think>",
        id="fields without effect",
    ),
    pytest.param(
        {"chat_template_kwargs": {"enable_thinking": False}}, "S: hello", id="an option"
    ),
    pytest.param(
        {
            "messages": [
                {"role": "system", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "b"}] * 2},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        CALL | {"function": {"arguments": '{"word": "c"}'}},
                        CALL | {"function": {"arguments": {"word": "d"}}},
                        CALL | {"function": {"arguments": "no JSON"}},
                    ],
                },
                {"role": "tool", "content": "e", "tool_call_id": "1"},
                {"role": "assistant"},
            ]
        },
        "aS: b\nbcde<think>",
        id="every kind of message",
    ),
]


def reader(template=TEMPLATE, tokenizer=TOKENIZER):
    served = Served(
        name="m",
        policy_version=0,
        tokenizer=tokenizer,
        template=template and ChatTemplate(template, {}, "the template"),
        enable_thinking=True,
        vocab_size=72,
        max_prompt_tokens=32,
        max_completion_tokens=64,
        max_samples=4,
        max_body_bytes=1,  # is the server's affair
        slots=1,
        max_waiting=0,
    )
    return BodyReader(served)


def written(body, template=TEMPLATE):
    """The text that a template makes of a request."""
    texts = []

    class Heard(Tokenizer):
        def encode_aside(self, text):
            texts.append(text)
            return [1]

    heard = Heard(backend=TOKENIZER.backend, eos_ids=TOKENIZER.eos_ids)
    reader(template, heard).chat(json.dumps({"messages": WORD} | body).encode())
    (text,) = texts
    return text


@pytest.mark.parametrize("body, text", WRITTEN)
def test_a_template_is_given_what_was_sent(body, text):
    assert written(body) == text.replace("S: ", PROMPT.partition("hello")[0])


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param("{{ c.function.arguments | tojson }}", id="writes JSON"),
        pytest.param(
            "{% for k, v in c.function.arguments | items %}{{ k }}{{ v }}{% endfor %}",
            id="goes over the items",
        ),
    ],
)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"arguments": ""}, id="an empty text"),
        pytest.param({"arguments": " "}, id="a space"),
        pytest.param({"arguments": None}, id="null"),
        pytest.param({"arguments": "null"}, id="null in a text"),
        pytest.param({"arguments": "{}"}, id="an object in a text"),
        pytest.param({"arguments": {}}, id="an object"),
        pytest.param({}, id="nothing"),
    ],
)
def test_a_call_without_arguments_has_an_empty_object(loop, arguments):
    template = (
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        f"<{{{{ c.function.name }}}}>{loop}{{% endfor %}}{{% endfor %}}"
    )

    def calling(**arguments):
        call = {"id": "1", "type": "function", "function": {"name": "now"} | arguments}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        return [*WORD, turn, {"role": "tool", "content": "12", "tool_call_id": "1"}]

    expected = transformers.AutoTokenizer.from_pretrained(BASE).apply_chat_template(
        calling(arguments={}), chat_template=template, tokenize=False
    )
    assert expected in ("hello<now>{}12", "hello<now>12")
    assert written({"messages": calling(**arguments)}, template) == expected


# Llama 3.1's, in short.
ONE_CALL = """\
{% for m in messages %}{% if 'tool_calls' in m %}{% if not m.tool_calls|length == 1 %}
{{- raise_exception('single tool-calls only') }}{% endif %}
{{- '<' + m.tool_calls[0].function.name + '>' }}{% else %}{{ m.content }}{% endif %}
{%- if m.name is defined %}{{ m.name.upper() }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("calls", [None, []])
def test_a_reply_that_is_sent_back_whole_has_no_calls(calls):
    reply = openai.types.chat.ChatCompletionMessage(role="assistant", content="olleh")
    turn = reply.model_dump() | {"tool_calls": calls, "name": None}
    assert written({"messages": [*WORD, turn, *WORD]}, ONE_CALL) == "helloollehhello"


MISTAKES = [
    ({"messages": []}, ("messages is missing",)),
    ({"messages": ["a"]}, ("messages.0 = 'a': ",)),
    ({"messages": [{"content": "a"}]}, ("'role' must be a text",)),
    ({"messages": [{"role": "user", "content": 1}]}, ("'content' must be a text",)),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        ("parts of 'content' must be",),
    ),
    ({"messages": [{"role": "a", "tool_calls": [1]}]}, ("objects with a 'function'",)),
    ({"messages": [{"role": "a", "tool_calls": 1}]}, ("'tool_calls' must be a list",)),
    ({"messages": [{"role": "critic"}]}, ("the template refuses", "no critics")),
    ({"messages": WORD * 33}, ("33 messages, which are more than",)),
    ({"messages": [{"role": "user", "content": "a" * 1921}]}, ("1936 characters",)),
    ({"messages": [{"role": "user", "content": "a" * 40}]}, ("tokens, which are",)),
    ({"tools": [{"a": ["b" * 1915]}]}, ("characters, which are more than",)),
    ({"tools": [TOOL] * 2 + [1]}, ("tools.2 = 1: ",)),
    ({"tool_choice": "required"}, ("tool_choice = 'required': ", "'auto' or 'none'")),
    ({"response_format": {"type": "json_object"}}, ("response_format.type = ",)),
    ({"top_logprobs": 2}, ("needs logprobs = true",)),
    ({"logprobs": True, "top_logprobs": 6}, ("top_logprobs = 6: ",)),
    ({"logprobs": 1}, ("logprobs = 1: ", "a valid boolean")),
    ({"max_completion_tokens": 65}, ("max_completion_tokens = 65", "= 64")),
    ({"max_tokens": 65}, ("max_tokens = 65", "= 64")),
    ({"max_tokens": 8, "max_completion_tokens": 9}, ("max_tokens = 8", "= 9 are two")),
    ({"stream_options": {"include_usage": True}}, ("needs stream = true",)),
    ({"n": 5}, ("n = 5", "--max_samples = 4")),
    ({"chat_template_kwargs": {"messages": []}}, ("may not hold 'messages'",)),
    ({"prompt": "a"}, ("'prompt' is not a field",)),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, ("is not text",)),
    ({"tools": [{}]}, ("the template fails: UndefinedError",)),
]


@pytest.mark.parametrize("body, words", MISTAKES)
def test_what_is_wrong_with_a_chat_is_named(body, words):
    template = TEMPLATE + "{% if tools %}{{ tools | tojson }}{% endif %}"
    with pytest.raises(ApiError) as error:
        reader(template).chat(json.dumps({"messages": WORD} | body).encode())
    assert error.value.status == 400
    for word in words:
        assert word in str(error.value)


NAMES = sorted(ChatFields.model_fields | CompletionFields.model_fields)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from(["\ud800", "text", "user", 10**400]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "\udfff"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(), VALUES, max_size=3))
def test_any_body_is_an_order_or_a_refusal_in_ascii(fields):
    mine = reader()
    for read, ground in [
        (mine.chat, {"messages": WORD}),
        (mine.completion, {"prompt": "a"}),
        (mine.tokens, {}),
    ]:
        try:
            read(json.dumps(ground | fields).encode())
        except ApiError as error:
            assert 400 <= error.status < 500
            assert error.response().body.isascii()


def test_without_a_template_there_is_no_chat():
    body = json.dumps({"messages": WORD}).encode()
    with pytest.raises(ApiError, match="no chat template: send a prompt to") as error:
        reader(None).chat(body)
    assert error.value.code == "no_chat_template"


def test_a_chat_whose_template_cannot_be_rendered_now_may_be_sent_again(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    monkeypatch.setattr(templates, "_PROCESS", TemplateProcess())
    with pytest.raises(ApiError, match="does not start .*: try again later") as error:
        reader().chat(json.dumps({"messages": WORD}).encode())
    assert error.value.status == 503
    assert error.value.code == "chat_template_unstarted"
