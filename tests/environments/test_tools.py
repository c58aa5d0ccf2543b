"""Tools: calls as policies write them, what they are answered, and what judges."""

import json

import pytest
from small_sandbox import sandboxed

from scalerl_jax.environments.calculator import calculate
from scalerl_jax.environments.search import Search
from scalerl_jax.environments.tools import (
    CALCULATOR,
    Call,
    Tool,
    Tools,
    find_calls,
    find_tool,
    schemas,
)
from scalerl_jax.environments.verdict import More


def qwen(name, **arguments):
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def test_calls_are_read_as_two_families_write_them():
    add = Call("calculator", {"expression": "1+1"})
    assert find_calls(f"so{qwen('calculator', expression='1+1')}") == [add]
    twice = qwen("calculator", expression="1+1") + qwen("search", query="a")
    assert find_calls(twice) == [add, Call("search", {"query": "a"})]
    llama = '{"name": "calculator", "parameters": {"expression": "1+1"}}'
    assert find_calls(f" {llama}\n") == [add]
    as_text = json.dumps(json.dumps(dict(add.arguments)))
    written = f'<tool_call>{{"name": "calculator", "arguments": {as_text}}}</tool_call>'
    assert find_calls(written) == [add]
    for plain in ("42", "", "{1, 2}", '{"name": "a"}', "</tool_call>", "<tool_call"):
        assert find_calls(plain) == []


@pytest.mark.parametrize(
    "text, said",
    [
        ("<tool_call>{", "a call ends with </tool_call>"),
        ("<tool_call>{</tool_call>", "a call is one json object"),
        ("<tool_call>[1]</tool_call>", "a json object with a name"),
        ('<tool_call>{"name": 3}</tool_call>', "a json object with a name"),
        ('<tool_call>{"name": "a"}</tool_call>', "has an object of arguments"),
        ("<tool_call>" * 9, "a turn has at most 8 calls"),
        (f"<tool_call>{'x' * 20_001}</tool_call>", "at most 20000 characters"),
        (f"<tool_call>{'[' * 15_000}</tool_call>", "a call is one json object"),
        (qwen("sum", expression="1"), "no tool 'sum'; there are calculator"),
        (qwen("calculator", sum="1"), "takes one text, expression"),
        (qwen("calculator", expression=1), "takes one text, expression"),
        (qwen("calculator", expression="1/0"), "error: division by zero"),
    ],
)
def test_a_call_that_is_none_is_told_so(text, said):
    environment = Tools([CALCULATOR], lambda *_: 1.0)
    environment.begin("a", None)
    answered = environment.step(text)
    assert isinstance(answered, More) and answered.role == "tool"
    assert said in answered.text


def test_the_turn_without_a_call_is_judged_and_so_is_the_last_one():
    def judge(prompt, completion, reference):
        return float((prompt, completion, reference) == ("2*3", "6", "six"))

    environment = Tools([CALCULATOR], judge)
    environment.begin("2*3", "six")
    calls = qwen("calculator", expression="2*3") + qwen("calculator", expression="1")
    assert environment.step(calls) == More("6\n1", "tool")
    assert environment.cut() == 0.0  # the last turn is still the call
    assert environment.step("6") == 1.0


def test_a_tool_that_returns_no_text_is_named():
    environment = Tools([Tool("size", "text", "Its length.", len)], lambda *_: 1.0)
    environment.begin("a", None)
    with pytest.raises(TypeError, match="the tool 'size' returned a value of type int"):
        environment.step(qwen("size", text="abc"))


@pytest.mark.parametrize(
    "expression, value",
    [
        ("12 * 34", "408"),
        (" -(2 + 3) * 4 ", "-20"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** 64", "18446744073709551616"),
        ("2 ** -1", "0.5"),
        ("0.1 + 0.2", "0.30000000000000004"),
    ],
)
def test_a_calculator_calculates(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "a",
        "1 +",
        "(1).real",
        "[1]",
        "True",
        "1 if 1 else 2",
        "9 ** 9 ** 9",
        "10 ** 400",
        "(-1) ** 0.5",
        "(-8) ** 0.5 // 1",
        "(-8) ** 0.5 % 2",
        "1e308 * 10",
        "(" * 300 + "1" + ")" * 90,
        "1" * 401,
        "'a' * 10",
        "1 << 2",
    ],
)
def test_a_calculator_refuses_what_is_no_sum(expression):
    with pytest.raises(ValueError):
        calculate(expression)


def test_search_finds_passages_and_stays_in_its_directory(tmp_path):
    inside = tmp_path / "documents"
    inside.mkdir()
    (tmp_path / "secret.txt").write_text("the secret platypus")
    (inside / "link.txt").symlink_to(tmp_path / "secret.txt")
    (inside / "birds.md").write_text("The heron fishes.\n\nThe owl hunts at night.\n")
    (inside / "rest.txt").write_text("A mole digs.")
    (inside / "other.bin").write_text("owl")
    tool = find_tool("search", str(inside))
    assert tool.call("night owl?") == "birds.md: The owl hunts at night."
    assert tool.call('mole" OR text:*') == "rest.txt: A mole digs."
    assert tool.call("platypus") == "nothing found"
    with pytest.raises(ValueError, match="the query has no word"):
        tool.call("?!")
    assert Search.of(str(inside)) is Search.of(str(inside))
    for directory, words in (
        (tmp_path / "none", "is no directory"),
        (tmp_path / "empty", "holds no text"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=words):
            Search.of(str(directory))


def test_a_tool_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="holds 'browser'; choose from"):
        find_tool("browser")
    with pytest.raises(ValueError, match="set episode.documents"):
        find_tool("search")


def test_templates_are_given_what_a_tool_takes():
    (schema,) = schemas([CALCULATOR])
    assert schema["function"]["name"] == "calculator"
    assert schema["function"]["parameters"]["required"] == ["expression"]


@sandboxed
def test_programs_run_alone_or_in_an_interpreter():
    alone = find_tool("python", timeout_s=100.0)
    kept = find_tool("interpreter", timeout_s=100.0)
    first = "import math\nx = math.comb(5, 2)\nprint('made')"
    assert alone.call(first) == "made"
    assert alone.call("x") == "NameError: name 'x' is not defined"
    assert kept.call(first) == "made"
    assert kept.call("x + 1") == "11"
    assert alone.call("1 / 0") == "ZeroDivisionError: division by zero"
    with pytest.raises(ValueError, match="took too long"):
        find_tool("python", timeout_s=3.0).call("while True: pass")


@sandboxed
def test_the_programs_of_a_turn_share_their_time():
    environment = Tools([find_tool("python", timeout_s=8.0)], lambda *_: 1.0)
    environment.begin("a", None)
    sleeping = qwen("python", code="import time; time.sleep(100)")
    printing = qwen("python", code="print(1)")
    both = environment.step(sleeping + printing)
    assert isinstance(both, More) and both.text.count("took too long") == 2
    assert environment.step(printing) == More("1", "tool")
