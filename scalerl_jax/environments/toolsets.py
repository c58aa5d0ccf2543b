"""Toolsets of `verifiers`, whose tools are called in this process.

verifiers starts a server for each toolset, which a program beside the policy calls.
Here a toolset registers its tools in the same way, and no server is started.
No JAX here.
"""

import contextvars
import json
from collections.abc import Iterator, Sequence
from typing import Any

from scalerl_jax.environments.tools import Call, refusal, shown

try:
    from mcp.server.mcpserver import MCPServer  # pyright: ignore[reportMissingImports]
    from mcp.server.mcpserver.exceptions import (  # pyright: ignore[reportMissingImports]
        ToolError,
    )
    from verifiers.v1 import Toolset  # pyright: ignore[reportMissingImports]
    from verifiers.v1.harnesses.utils.mcp import (  # pyright: ignore[reportMissingImports]
        mcp_content_to_chat_content,
    )
except ImportError as error:
    _MISSING = f"{error}; pip install 'verifiers>=0.4,<0.5', or scalerl_jax[verifiers]"
    raise ImportError(_MISSING) from error

# The trace of the conversation whose tool is called; its state is the tool's state.
_CALLER: contextvars.ContextVar[Any] = contextvars.ContextVar("_CALLER")


class Refusal(ValueError):
    """A package, or its use of a turn, is not supported; the message has the reason."""


def faults_of(toolset: Any, name: str) -> Iterator[str]:
    """Yield what a toolset of the package's class `name` needs beside a process."""
    if not isinstance(toolset, Toolset):
        yield f"{name} gives {toolset!r:.80} for a toolset"
        return
    kind, config = type(toolset).__name__, toolset.config
    if getattr(config, "url", None):
        yield f"{kind} is a server at {config.url}, over the network"
    if getattr(config, "colocated", False):
        yield f"{kind} runs in the container of a program, and there is none"
    runtime = getattr(getattr(config, "runtime", None), "type", "subprocess")
    if runtime != "subprocess":
        yield f"{kind} runs in a container ({runtime}), and there is none"


class LiveTools:
    """A toolset whose tools can be called; a task's own, or shared by its taskset."""

    def __init__(self, toolset: Any) -> None:
        """Register no tool yet: the tools may depend on the setup."""
        self._toolset = toolset
        self._prefix = f"{toolset.server_name}_" if toolset.server_name else ""
        self._server = MCPServer(toolset.server_name or type(toolset).__name__)
        self.schemas: dict[str, dict[str, Any]] = {}  # by the name in a call
        _share_state(toolset)

    async def start(self, data: Any = None) -> None:
        """Set the toolset up, with a task's `data` if it is a task's own."""
        await self._toolset.setup()
        if data is not None:
            await self._toolset.setup_task(data)
        self._toolset.register(self._server)
        for tool in await self._server.list_tools():
            name = f"{self._prefix}{tool.name}"
            self.schemas[name] = {
                "name": name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }

    async def close(self) -> None:
        """Close what the toolset has opened."""
        await self._toolset._exit_stack.aclose()

    async def call(self, call: Call, trace: Any) -> str:
        """Return a tool's result, or its error: a text for the policy."""
        token = _CALLER.set(trace)
        try:
            found = await self._server.call_tool(
                call.name.removeprefix(self._prefix), dict(call.arguments)
            )
        except ToolError as error:
            return shown(str(error))
        finally:
            _CALLER.reset(token)
        said = mcp_content_to_chat_content(found.content)
        if not isinstance(said, str):
            raise Refusal(f"{call.name} gives a picture, which no policy here reads")
        return shown(said)


def _share_state(toolset: Any) -> None:
    """Give a toolset's calls the state of their conversation, and take it back."""
    adapter = toolset._state_adapter

    async def pull() -> Any:
        return adapter.validate_json(_CALLER.get().state.model_dump_json())

    async def push(before: bytes) -> None:
        after = adapter.dump_json(toolset.state)
        if after != before:
            trace = _CALLER.get()
            trace.state = type(trace.state).model_validate_json(after)

    # This replaces requests to a server that holds the state.
    toolset._pull_state, toolset._push_state = pull, push


class Toolbox:
    """The tools of a conversation, by the names under which the policy calls them."""

    def __init__(self, served: Sequence[LiveTools]) -> None:
        """Take toolsets that have started.

        Raises:
            Refusal: two tools have one name.
        """
        self._served: dict[str, LiveTools] = {}
        for each in served:
            for name in each.schemas:
                if name in self._served:
                    raise Refusal(f"two tools are called {name!r}; give a TOOL_PREFIX")
                self._served[name] = each

    def __bool__(self) -> bool:
        """Return whether there is any tool."""
        return bool(self._served)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools in the form that chat templates take."""
        return [
            {"type": "function", "function": each.schemas[name]}
            for name, each in self._served.items()
        ]

    async def answer(self, call: Call, trace: Any) -> str:
        """Return a call's result, or what is wrong with it: a text for the policy."""
        if wrong := refusal(call, self._served):
            return wrong
        return await self._served[call.name].call(call, trace)


def written(call: Call) -> dict[str, str]:
    """Return a call's name and arguments in the form of verifiers' `ToolCall`."""
    return {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
