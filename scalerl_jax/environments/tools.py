"""Tools that a policy calls in its text, and the environment that answers its calls.

    <tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>
    {"name": "calculator", "parameters": {"expression": "2+3"}}

The first form is Qwen3's: a turn may have several calls.  The second is Llama 3's: the
call is the whole turn.  A turn without a call is the answer.  No JAX here.
"""

import contextvars
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from scalerl_jax.environments import sandbox
from scalerl_jax.environments.calculator import calculate
from scalerl_jax.environments.sandbox import (
    OutOfTime,
    Sandbox,
    SandboxLimits,
)
from scalerl_jax.environments.search import Search
from scalerl_jax.environments.verdict import Done, More, Verdict
from scalerl_jax.formats.reading import parse_json

_BEGIN, _END = "<tool_call>", "</tool_call>"  # Qwen3's
_MOST_CALLS = 8  # in a turn
_MOST_CALL = 20_000  # characters
_MOST_RESULT = 4000  # characters of a tool's result; the rest is cut
# Of reward.timeout_s: a program's CPU time, and the time of all programs of a turn.
_CPU_SHARE, _WALL_SHARE = 0.4, 0.6
_MEMORY_MIB = 512
_MOST_OUTPUT = 2**20  # bytes of a program's output as JSON
# When the turn began whose calls are answered; time.monotonic().
_TURN_BEGAN = contextvars.ContextVar[float | None]("_TURN_BEGAN", default=None)


class Tool(NamedTuple):
    """A function with one text as its argument."""

    name: str
    parameter: str
    description: str
    call: Callable[[str], str]  # raises ValueError: the reason is what the policy reads


class Call(NamedTuple):
    """A call in a text: a tool's name and the arguments, or why it is malformed."""

    name: str
    arguments: Mapping[str, Any]
    malformed: str = ""


def find_calls(text: str) -> list[Call]:
    """Return the calls in the text of a turn, in order."""
    if _BEGIN in text:
        pieces = text.split(_BEGIN)[1:]
        if len(pieces) > _MOST_CALLS:
            return [_malformed(f"a turn has at most {_MOST_CALLS} calls")]
        return [_read_call(piece, "arguments", ended=_END) for piece in pieces]
    whole = text.strip()
    if whole.startswith("{") and '"name"' in whole and '"parameters"' in whole:
        return [_read_call(whole, "parameters")]
    return []


def _read_call(text: str, field: str, *, ended: str = "") -> Call:
    body = text
    if ended:
        body, found, _ = text.partition(ended)
        if not found:
            return _malformed(f"a call ends with {ended}")
    if len(body) > _MOST_CALL:
        return _malformed(f"a call has at most {_MOST_CALL} characters")
    try:
        call = parse_json(body.strip())
    except ValueError:
        return _malformed("a call is one json object")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _malformed("a call is a json object with a name")
    arguments = call.get(field)
    if isinstance(arguments, str):  # JSON in a text, as in OpenAI's form
        try:
            arguments = parse_json(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        return _malformed(f"a call has an object of {field}")
    return Call(call["name"], arguments)


def before_calls(text: str) -> str:
    """Return the text of a turn before its first call; "" without a call."""
    return text.partition(_BEGIN)[0] if _BEGIN in text else ""


def _malformed(why: str) -> Call:
    return Call("", {}, f"malformed call: {why}")


def refusal(call: Call, names: Collection[str]) -> str:
    """Return what is wrong with a call, given the names of the tools, or ""."""
    if call.malformed or call.name in names:
        return call.malformed
    return f"no tool {call.name[:40]!r}; there are {', '.join(sorted(names))}"


def shown(result: str) -> str:
    """Return a tool's result as the policy reads it, cut if it is too long."""
    if len(result) <= _MOST_RESULT:
        return result
    return f"{result[:_MOST_RESULT]} ... ({len(result)} characters)"


def answer(call: Call, tools: Mapping[str, Tool]) -> str:
    """Return the result of a call, or what is wrong with it: a text for the policy.

    Raises:
        TypeError: the tool returned something else than a text.
    """
    if wrong := refusal(call, tools):
        return wrong
    tool = tools[call.name]
    given = call.arguments.get(tool.parameter)
    if not isinstance(given, str) or len(call.arguments) != 1:
        return f"malformed call: {tool.name} takes one text, {tool.parameter}"
    try:
        result = tool.call(given)
    except ValueError as error:
        return f"error: {error}"
    if not isinstance(result, str):
        raise TypeError(
            f"the tool {tool.name!r} returned a value of type {type(result).__name__}, "
            f"and must return a text"
        )
    return shown(result)


class Tools:
    """The environment of tools: it answers calls, and judges the turn without one."""

    def __init__(
        self,
        tools: Sequence[Tool],
        judge: Callable[[str, str, Any], float | Done | Verdict],
    ) -> None:
        """Judge as a reward function does: by prompt, last turn and reference."""
        self._tools = {tool.name: tool for tool in tools}
        self._judge = judge

    def begin(self, prompt: str, reference: Any) -> None:
        """Store the prompt."""
        self._prompt, self._reference = prompt, reference
        self._last = ""

    def step(self, completion: str) -> More | float | Done | Verdict:
        """Answer the calls of a turn, or judge it."""
        self._last = completion
        calls = find_calls(completion)
        if not calls:
            return self._judge(self._prompt, completion, self._reference)
        began = _TURN_BEGAN.set(time.monotonic())
        try:
            answers = [answer(call, self._tools) for call in calls]
        finally:
            _TURN_BEGAN.reset(began)
        return More("\n".join(answers), role="tool")

    def cut(self) -> float | Done | Verdict:
        """Judge the last turn, although it called a tool."""
        return self._judge(self._prompt, self._last, self._reference)


def make(
    tools: Sequence[str],
    documents: str,
    timeout_s: float,
    verify: Callable[[str], Verdict],
) -> Tools:
    """Make the environment "tools", whose answers the prompt's own verifier judges.

    Raises:
        ValueError: there is no such tool, or no documents to search.
        SandboxError: a tool runs programs, and no sandbox can be made.
    """
    found = [find_tool(name, documents, timeout_s) for name in tools]
    if "search" in tools:
        Search.of(documents)  # before the first call, whose time is short
    if {"python", "interpreter"} & set(tools):
        sandbox.check()
    return Tools(found, lambda prompt, completion, reference: verify(completion))


def find_tool(name: str, documents: str = "", timeout_s: float = 10.0) -> Tool:
    """Return a new tool by its name in episode.tools.

    Raises:
        ValueError: no tool has that name, or it lacks what it needs.
    """
    makers: dict[str, Callable[[], Tool]] = {
        "calculator": lambda: CALCULATOR,
        "python": lambda: python(timeout_s),
        "interpreter": lambda: interpreter(timeout_s),
        "search": lambda: search(documents),
    }
    if name not in makers:
        raise ValueError(
            f"episode.tools holds {name!r}; choose from {sorted(makers)}, or make an "
            f"environment of your own"
        )
    return makers[name]()


def schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools in the form that chat templates take."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": {
                    "type": "object",
                    "properties": {tool.parameter: {"type": "string"}},
                    "required": [tool.parameter],
                },
            },
        }
        for tool in tools
    ]


# The calculator.

CALCULATOR = Tool(
    "calculator",
    "expression",
    "The value of an expression of numbers, + - * / // % ** and brackets.",
    calculate,
)


# Python in the sandbox of solutions.

# Runs cells in one namespace, and shows what the last one prints, and its last value.
_CELLS = """
import ast, contextlib, io
_names = {{"__name__": "__main__"}}
def _run(source):
    try:
        tree = ast.parse(source)
        shown = tree.body and isinstance(tree.body[-1], ast.Expr)
        last = tree.body.pop() if shown else None
        exec(compile(tree, "cell.py", "exec"), _names)
        if last:
            value = eval(compile(ast.Expression(last.value), "cell.py", "eval"), _names)
            if value is not None:
                print(repr(value))
    except BaseException as error:
        print(f"{{type(error).__name__}}: {{error}}")
for _source in {before!r}:
    with contextlib.redirect_stdout(io.StringIO()):
        _run(_source)
_run({last!r})
"""


def run_cells(cells: Sequence[str], *, timeout_s: float) -> str:
    """Run programs in one namespace of a new sandbox; return what the last one prints.

    The calls of a turn share their time, or the pool would end the whole process.

    Raises:
        ValueError: it takes more than its time or memory.
        SandboxError: no sandbox can be made; nothing was run.
    """
    limits = SandboxLimits(
        cpu_s=max(1, int(_CPU_SHARE * timeout_s)), memory_mib=_MEMORY_MIB
    )
    source = _CELLS.format(before=list(cells[:-1]), last=cells[-1])
    now = time.monotonic()
    end = (_TURN_BEGAN.get() or now) + _WALL_SHARE * timeout_s
    if now >= end:
        raise ValueError("the program took too long, with those before it in the turn")
    opened = Sandbox("solution", limits)
    try:
        opened.await_ready(deadline=end)
        channel = opened.channel
        if "unreadable" in channel.ask({"source": source}, deadline=end):
            raise ValueError("the program cannot be read")
        reply = channel.ask({"do": "run", "stdin": ""}, deadline=end, most=_MOST_OUTPUT)
    except (OutOfTime, EOFError):
        raise ValueError("the program took too long, or printed too much") from None
    finally:
        opened.close()
    match reply.get("value"):
        case [0, str(output)]:
            return output.rstrip("\n")
        case [int(code), str()] if -code in (signal.SIGKILL, signal.SIGXCPU):
            raise ValueError("the program took too long")  # CPU time
        case [int(code), str(output)]:
            return f"{output}the program ended with status {code}"
    raise ValueError("the program took too much memory")


def python(timeout_s: float) -> Tool:
    """Return the tool that runs each program by itself."""
    return Tool(
        "python",
        "code",
        "Run a Python program; what it prints, and the value of its last line.",
        lambda code: run_cells([code], timeout_s=timeout_s),
    )


def interpreter(timeout_s: float) -> Tool:
    """Return the tool of an interpreter, which keeps what earlier programs defined.

    Each program runs in a new sandbox, after all earlier ones, whose output is dropped.
    """
    cells: list[str] = []

    def call(code: str) -> str:
        found = run_cells([*cells, code], timeout_s=timeout_s)
        cells.append(code)
        return found

    return Tool(
        "python",
        "code",
        "Run Python in an interpreter that keeps its variables; what it prints, and "
        "the value of the last line.",
        call,
    )


# Search.


def search(documents: str) -> Tool:
    """Return the tool that searches a directory of text files, read when it is used.

    Raises:
        ValueError: none is named.
    """
    if not documents:
        raise ValueError(
            "the tool 'search' needs a directory of text files; set episode.documents"
        )
    return Tool(
        "search",
        "query",
        "Passages of the documents that hold most of the words of a query.",
        lambda query: Search.of(documents).passages(query),
    )
