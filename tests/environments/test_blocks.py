"""The blocks of Markdown's code in a completion, and the one that is the program."""

import time

import pytest

from scalerl_jax.environments.judges import blocks


def contents(text):
    return [block.content for block in blocks.find_blocks(text)]


@pytest.mark.parametrize(
    "text, expected",
    [
        pytest.param("a\n```python\nx = 1\n```\nb", ["x = 1\n"], id="one"),
        pytest.param("```\nx\n```\n```\ny\n```", ["x\n", "y\n"], id="two"),
        pytest.param("~~~py\nx\n```\n~~~", ["x\n```\n"], id="tildes"),
        pytest.param("````\n```\nx\n```\n````", ["```\nx\n```\n"], id="a longer fence"),
        pytest.param("```\nx\n`````", ["x\n"], id="closed by a longer fence"),
        pytest.param("```\nx\n``` no\n```", ["x\n``` no\n"], id="a fence stands alone"),
        pytest.param("```\nx = '```'\n```", ["x = '```'\n"], id="a fence in a line"),
        pytest.param(
            "```\ndef f():\n    ```\n```", ["def f():\n    ```\n"], id="in a docstring"
        ),
        pytest.param("1. a\n\n   ```\n   x\n     y\n   ```", ["x\n  y\n"], id="a list"),
        pytest.param("\t```\n\tx\n\t\ty\n\t```", ["x\n\ty\n"], id="tabs"),
        pytest.param("   ```\nx\n  y\n   ```", ["x\ny\n"], id="indented less"),
        pytest.param("1. ```\n   x\n   ```", ["x\n"], id="behind a list's number"),
        pytest.param("- * ```\n    x\n    ```", ["x\n"], id="behind two bullets"),
        pytest.param("> ```\n> x\n>  y\n> ```", ["x\n y\n"], id="a quote"),
        pytest.param("> ```\n> x\ny\n```\nz\n```", ["z\n"], id="a quote that ends"),
        pytest.param("```\r\nx\r\n```\r\n", ["x\n"], id="Windows"),
        pytest.param("```\nx\x0c\n```", ["x\x0c\n"], id="a form feed"),
        pytest.param("```x``` and\n```\ny\n```", ["y\n"], id="code within a line"),
        pytest.param("```\nprint(3)```", ["print(3)\n"], id="closed behind the code"),
        pytest.param("```\nx```\nDone.", ["x\n"], id="and text follows"),
        pytest.param("```\nx```\n```py\ny\n```", ["x\n", "y\n"], id="and a block"),
        pytest.param("```\n```", [""], id="empty"),
        pytest.param("```python\nx", [], id="never closed"),
        pytest.param("x = 1", [], id="no block"),
        pytest.param("", [], id="nothing"),
    ],
)
def test_blocks_are_those_of_commonmark(text, expected):
    assert contents(text) == expected


@pytest.mark.parametrize(
    "info, expected",
    [
        *[(tag, True) for tag in ("", "python", "Python", "py", "py3", "python3.11")],
        *[(tag, True) for tag in (" python title=x.py", "python:x.py", "{.python}")],
        *[(tag, False) for tag in ("text", "output", "bash", "c++", "pycon", "json")],
    ],
)
def test_a_program_is_tagged_as_python_or_not_at_all(info, expected):
    found = blocks.find_program(f"```{info}\nx\n```")
    assert found == ("x\n" if expected else None)


@pytest.mark.parametrize(
    "others, names, reads",
    [
        pytest.param(["```\n15\n```"], [], False, id="output"),
        pytest.param(["```python\nprint(f(5))\n```"], ["f"], False, id="a call"),
        pytest.param(["```python\nassert f(x=5) == 1\n```"], ["f"], False, id="a test"),
        pytest.param(["```python\nprint('15')\n```"], [], True, id="reads nothing"),
        pytest.param(["```python\nf = 1\n```"], ["g"], False, id="another name"),
        pytest.param(["```python\ng = 1\n```"], ["f", "g"], False, id="fewer names"),
    ],
)
@pytest.mark.parametrize("tag", ["python", ""])
def test_what_stands_behind_the_program_is_not_it(others, names, reads, tag):
    program = "import sys\ndef f(x):\n  return 3 * x\ng = h = f\nf(input())\n"
    text = "\n".join([f"```{tag}\n{program}```", *others])
    if tag or names or reads:
        assert blocks.find_program(text, names, reads=reads) == program


@pytest.mark.parametrize(
    "first, last",
    [
        ("```python\nprint(0)\n```", "```python\nprint(1)\n```"),
        ("```\nprint(0)\n```", "```\nprint(1)\n```"),
        ("```\ninput(0)\n```", "```python\ninput(1)\n```"),
        ("```python\ndef f(): 0\n```", "```python\nclass f: 1\n```"),
        ("```python\ndef f(): 0\n```", "```\nasync def f(): 1\n```"),
        ("```python\nf(0)\n```", "```python\nf: int = 1\n```"),
    ],
)
def test_of_programs_alike_the_last_one_counts(first, last):
    if first.startswith("```python\ndef") and last.startswith("```\n"):
        first, last = last, first  # a tag decides between two that define the name
    found = blocks.find_program(f"{first}\nNo:\n{last}\n", ["f"], reads=True)
    assert found == last.partition("\n")[2].removesuffix("```")


@pytest.mark.parametrize(
    "text",
    [
        "> " * 50_000 + "x",
        ("> " * 2_000 + "```\n") * 20 + "> \n" * 1_000,
        "- " * 50_000 + "x",
        "```\n" + "x```\n" * 50_000,
        "`" * 200_000 + "x`",
        "> ```\nx\n" * 20_000,
        "    " * 50_000 + "```",
    ],
    ids=range(7),
)
def test_blocks_are_found_in_time(text):
    start = time.process_time()
    blocks.find_program(text, ["f"], reads=True)
    assert time.process_time() - start < 2.0
