"""What a client can get wrong: refused in OpenAI's form, and the server goes on."""

import json
import socket
from urllib.parse import urlsplit

import pytest
from small_server import FLAGS, JSON


def refused(result, *words, status=400, param=None, code=None):
    """An error of this status that holds these words."""
    found, body = result
    assert found == status, body
    error = body.pop("error")
    assert body == {} and set(error) == {"message", "type", "param", "code"}
    kinds = {429: "rate_limit_error"}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert error["type"] == kinds.get(status, kind)
    assert (error["param"], error["code"]) == (param, code)
    for word in words:
        assert word in error["message"], error


BODIES = [
    pytest.param(b"", ("the body is not JSON",), id="empty"),
    pytest.param(b'{"prompt": "a"', ("the body is not JSON",), id="torn"),
    pytest.param(b"\xff\xfe\x00", ("the body is not JSON",), id="not text"),
    pytest.param(b"[" * 9000, ("the body is not JSON",), id="nested too deep"),
    pytest.param(b'["a"]', ("is JSON, but not an object",), id="an array"),
    pytest.param(b'{"n": %s}' % (b"9" * 5000), ("not JSON",), id="endless number"),
]


@pytest.mark.parametrize("body, words", BODIES)
def test_a_body_that_is_no_object_is_refused(server, body, words):
    refused(server.ask("/v1/completions", body, method="POST"), *words)


FIELDS = [
    ("prompt", None, ("prompt = None", "a list of such lists")),
    ("prompt", "", ("prompt 0 has no tokens",)),
    ("prompt", [], ("not be empty",)),
    ("prompt", {"text": "a"}, ("it must be a string, a list of strings",)),
    ("prompt", ["a", [1]], ("both strings and token ids",)),
    ("prompt", [1, 72], ("prompt 0 holds 72", "from 0 to 71")),
    ("prompt", "\ud800", ("prompt 0 is not text",)),
    ("prompt", ["a"] * 1001, ("1001 prompts", "--max_samples = 1000")),
    ("model", 3, ("model = 3: Input should be a valid string",)),
    ("max_tokens", 0, ("max_tokens = 0 asks for nothing", "echo = true")),
    ("max_tokens", -1, ("max_tokens = -1: ", "greater than or equal to 0")),
    ("max_tokens", 65, ("max_tokens = 65: ", "at most --max_completion_tokens = 64")),
    ("max_tokens", 2.5, ("max_tokens = 2.5: ", "a valid integer")),
    ("max_tokens", True, ("max_tokens = True: ", "a valid integer")),
    ("temperature", float("nan"), ("temperature = nan: ", "a finite number")),
    ("temperature", float("inf"), ("temperature = inf: ", "a finite number")),
    ("temperature", -0.1, ("temperature = -0.1: ", "greater than or equal to 0")),
    ("temperature", 1e-40, ("temperature = 1e-40: ", "0 or from 0.001")),
    ("temperature", "1", ("temperature = '1': ", "a valid number")),
    ("top_p", -0.1, ("top_p = -0.1: ", "greater than or equal to 0")),
    ("top_p", 1.1, ("top_p = 1.1: ", "less than or equal to 1")),
    ("top_k", -2, ("top_k = -2: ", "equal to -1")),
    ("top_k", 0.5, ("top_k = 0.5: ", "a valid integer")),
    ("min_p", -1, ("min_p = -1: ", "equal to 0")),
    ("n", 0, ("n = 0: ", "equal to 1")),
    ("n", 10**30, ("n = 1000000000", "--max_samples = 1000")),
    ("best_of", 2, ("best_of = 2 is not supported", "n = 1")),
    ("seed", -(2**63) - 1, ("seed = -9223372036854775809: ", "greater than or equal")),
    ("seed", 2**63, ("seed = 9223372036854775808: ", "less than 9223372036854775808")),
    ("stop", ["a"] * 17, ("at most 16",)),
    ("logprobs", 6, ("logprobs = 6: ", "less than or equal to 5")),
    ("logprobs", True, ("logprobs = True: ", "a valid integer")),
    ("echo", 1, ("echo = 1: ", "a valid boolean")),
    ("suffix", "b", ("suffix = 'b': ", "at most 0 characters")),
    ("logit_bias", {"5": 1}, ("logit_bias = {'5': 1}: ", "at most 0 items")),
    ("stream", "yes", ("stream = 'yes': ", "a valid boolean")),
    ("stream_options", {"include_usage": True}, ("needs stream = true",)),
    ("stream_options", {}, ("needs stream = true",)),
    ("stream_options", True, ("stream_options = True: ", "a valid dictionary")),
    ("max_token", 5, ("'max_token' is not a field", "'max_tokens'")),
]


@pytest.mark.parametrize("name, value, words", FIELDS)
def test_a_wrong_field_is_named(server, name, value, words):
    body = {"prompt": "a"} | {name: value}
    refused(server.ask("/v1/completions", body), *words, param=name)


@pytest.mark.parametrize(
    "name, value, param",
    [
        ("stream_options", {"include": True}, "stream_options.include"),
        ("stop", "", "stop.0"),
        ("stop", "a" * 129, "stop.0"),
        ("stop", ["a", 1], "stop.1"),
        ("prompt", [[]], "prompt.0.ids"),
        ("prompt", [True], "prompt.0.ids"),
        ("prompt", [1, "a"], "prompt.0.ids.1"),
        ("prompt", [1, True], "prompt.0.ids.1"),
        ("prompt", [[1], [-1]], "prompt.1.ids.0"),
        ("\ud800", 1, "\\ud800"),
    ],
)
def test_a_wrong_part_of_a_field_is_named(server, name, value, param):
    body = {"prompt": "a", name: value}
    refused(server.ask("/v1/completions", body), param=param)


def test_a_prompt_that_is_too_long_is_told_the_limit(server):
    for prompt in ("a" * 33, [5] * 33, ["a", "b" * 33]):
        refused(
            server.ask("/v1/completions", {"prompt": prompt}),
            "has 33 tokens, which are more than --max_prompt_tokens = 32",
            param="prompt",
            code="context_length_exceeded",
        )
    assert server.ask("/v1/completions", {"prompt": [5] * 32})[0] == 200
    refused(
        server.ask("/v1/completions", {"prompt": [5] * 33, "echo": True}),
        "has 33 tokens, which are more than --max_prompt_tokens = 32",
        param="prompt",
        code="context_length_exceeded",
    )
    refused(
        server.ask(
            "/v1/completions", {"prompt": [5] * 97, "echo": True, "max_tokens": 0}
        ),
        "97 tokens",
        "--max_prompt_tokens + --max_completion_tokens = 96 tokens",
        param="prompt",
        code="context_length_exceeded",
    )


def test_more_completions_than_one_request_may_have_are_refused(server):
    body = {"prompt": ["a", "b"], "n": 501}
    words = ("2 prompts with n = 501 are more", "--max_samples = 1000")
    refused(server.ask("/v1/completions", body), *words, param="n")


def test_fields_that_ask_for_nothing_are_taken(server):
    body = {
        **{"prompt": "a", "model": None, "temperature": None, "stop": [], "n": 1},
        **{"echo": False, "suffix": None, "best_of": 1, "logit_bias": {}, "user": "me"},
        **{"presence_penalty": 0, "frequency_penalty": 0.0, "top_k": -1, "top_p": 1},
        **{"min_p": 0, "stream": False, "stream_options": None, "seed": 0},
    }
    assert server.ask("/v1/completions", body)[0] == 200
    extremes = {"top_k": 2**62, "top_p": 1e-300, "min_p": 1e-300, "temperature": 100}
    assert server.ask("/v1/completions", {"prompt": "a", **extremes})[0] == 200


def test_a_body_that_is_too_large_is_not_read(server):
    words = (f"more than --max_body_bytes = {FLAGS['max_body_bytes']} bytes",)
    options = {"status": 413, "code": "request_too_large"}
    body = {"prompt": "a" * FLAGS["max_body_bytes"]}
    refused(server.ask("/v1/completions", body), *words, **options)
    connection = server.connect()  # the length not told beforehand
    pieces = iter([b"{" + b" " * 9000] * 3)
    connection.request(
        "POST", "/v1/completions", pieces, headers=JSON, encode_chunked=True
    )
    response = connection.getresponse()
    refused((response.status, json.loads(response.read())), *words, **options)
    connection.close()


@pytest.mark.parametrize(
    "method, path, status",
    [("GET", "/v1/completions", 405), ("POST", "/health", 405), ("GET", "/v2", 404)],
)
def test_another_path_or_method_is_refused(server, method, path, status):
    refused(server.ask(path, method=method), f"{method} {path}", status=status)


def test_what_is_not_http_is_refused(server):
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as raw:
        raw.settimeout(10)
        raw.sendall(b"\x16\x03\x01nonsense\r\n\r\n")
        assert b"400" in raw.recv(1000).splitlines()[0]


def test_a_client_that_leaves_within_its_body_is_forgotten(server):
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        raw.sendall(b'Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"p')
    assert server.health()["status"] == "ok"


def test_the_server_has_nothing_to_say_about_any_of_this(server):
    """Last in this file: a traceback would have come to its stderr."""
    assert server.process.poll() is None
    assert "Traceback" not in server.said()
