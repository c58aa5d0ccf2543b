"""The text of a function for another process: all that it uses, or a refusal."""

import functools
import math
import subprocess
import sys
import wsgiref.util
from textwrap import dedent as flush

import pytest

from scalerl_jax.environments.function_text import text_of

HALF, WORDS = 0.5, {"a": [1, 2]}
LOCK = object()
completion = word = LOCK  # a notebook's other cells name things so


def helper(x):
    return sum(x for word in [1]) * HALF


def score(prompt, completion, reference):
    if prompt == "again":
        return score("", completion, reference)
    return math.floor(helper(len(flush(completion)))) + WORDS["a"][1]


def locked(prompt, completion, reference):
    return LOCK


def test_the_text_alone_gives_the_same_function():
    module = {}
    exec(text_of(score), module)
    # floor(5 / 2) + 2
    assert module["score"]("again", "abcde", None) == 4 == score("", "abcde", None)
    assert set(module) - {"__builtins__"} == {
        *("HALF", "WORDS", "helper", "score", "math", "flush")
    }


def guessed(prompt, completion, reference):
    return wsgiref.util.guess_scheme({"HTTPS": completion})


def test_a_submodule_is_imported_by_its_whole_name(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(text_of(guessed) + "print(guessed('', 'on', None))\n")
    command = [sys.executable, str(file)]  # which has imported no such module
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.stdout, found.stderr) == ("https\n", "")


if HALF:

    def template(prompt, completion, reference=HALF):
        return """
        Judge this,
but kindly.""" + str(reference)


def test_the_text_of_an_indented_function_keeps_its_strings():
    module = {}
    exec(text_of(template), module)
    assert module["template"]("", "") == template("", "")


def make(x):
    def inner(prompt, completion, reference):
        return x

    return inner


@pytest.mark.parametrize(
    "function, message",
    [
        (locked, "locked uses LOCK, of type object, which no text makes again"),
        (make(1), "inner uses x of the function around it"),
        (lambda p, c, r: 1, "must be made by def"),
        (functools.partial(helper), "must be made by def"),
    ],
)
def test_what_no_text_makes_again_is_refused_by_name(function, message):
    with pytest.raises(ValueError, match=message) as error:
        text_of(function)
    assert "reward='my_task.py:score'" in str(error.value)
