"""Conversations of the policy with tasks of `verifiers`, and their scores.

An environment of a package is a coroutine, `Env.run`, that asks its agent for one turn
after the other.  The agent here is the policy: it passes the messages on and waits for
the turn, which a sampler in another process makes and which is not tokenised again.
None of verifiers' own servers and programs is started.  A task without an environment
is played with verifiers' `SingleAgentEnv`.  No JAX here.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, NoReturn

from scalerl_jax.environments.tasksets import (
    Package,
    faults_of_task,
    messages_of,
    toolsets_of,
)
from scalerl_jax.environments.tools import Call, before_calls, find_calls
from scalerl_jax.environments.toolsets import LiveTools, Refusal, Toolbox, written
from scalerl_jax.environments.verdict import Done

try:
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    from verifiers.v1.session import (  # pyright: ignore[reportMissingImports]
        call_hook,
    )
    from verifiers.v1.state import state_cls  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.decorators import (  # pyright: ignore[reportMissingImports]
        invoke,
    )
except ImportError as error:
    _MISSING = f"{error}; pip install 'verifiers>=0.4,<0.5', or scalerl_jax[verifiers]"
    raise ImportError(_MISSING) from error

_CUT = "max_turns"  # verifiers' stop condition, used for every limit of a run


class Uncounted(vf.Trace):
    """A trace that no server has sampled: none of its tokens is counted."""

    def _unknown(self, name: str) -> NoReturn:
        raise Refusal(f"it reads trace.{name}, which is not known here")

    @property
    def usage(self) -> NoReturn:
        """Refuse, as 0 would be a wrong count."""
        self._unknown("usage")

    @property
    def num_input_tokens(self) -> NoReturn:
        """Refuse, as 0 would be a wrong count."""
        self._unknown("num_input_tokens")

    @property
    def num_output_tokens(self) -> NoReturn:
        """Refuse, as 0 would be a wrong count."""
        self._unknown("num_output_tokens")

    @property
    def num_total_tokens(self) -> NoReturn:
        """Refuse, as 0 would be a wrong count."""
        self._unknown("num_total_tokens")


class PolicyTurn(NamedTuple):
    """The parts of a turn that the policy wrote."""

    thought: str
    said: str
    calls: list[Call]

    @classmethod
    def read(cls, text: str, end_of_thinking: str) -> "PolicyTurn":
        """Read a turn, whose thinking ends with the text, if it is any."""
        if not end_of_thinking:
            return cls("", text, find_calls(text))
        if end_of_thinking not in text:
            return cls(text, "", find_calls(text))
        thought, _, said = text.rpartition(end_of_thinking)
        return cls(thought, said, find_calls(said))


class Agent:
    """The policy as an agent of an environment."""

    def __init__(self, episode: "Playthrough", config: Any) -> None:
        """Take the episode, in whose one conversation this agent speaks."""
        self._episode, self.config = episode, config
        self.trainable = True

    async def run(self, task: Any, **given: Any) -> Any:
        """Let the policy do a task by itself; return the finished trace."""
        if task.data.prompt is None:
            raise Refusal(
                "its agent runs a task without a prompt; speak to it in an interaction"
            )
        trace = await self._begin(task, given)
        await self._episode.segment(messages_of(task.data))
        trace.stop("agent_completed")
        return await self._episode.finish()

    @contextlib.asynccontextmanager
    async def interaction(
        self, task: Any, **given: Any
    ) -> "AsyncIterator[Interaction]":
        """Open a conversation with the policy, one turn after the other."""
        opened = Interaction(self._episode, await self._begin(task, given))
        yield opened
        await opened.close()

    async def provision(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: there is no container."""
        raise Refusal("it asks for a container (agent.provision), and there is none")

    async def _begin(self, task: Any, given: dict[str, Any]) -> Any:
        listen = given.pop("on_trace", None)
        for name, value in given.items():
            if value:
                raise Refusal(f"it gives its agent {name} = {value!r:.60}")
        trace = await self._episode.begin(task, self.config)
        if listen is not None:
            listen(trace)
        return trace


class Agents:
    """The agents of an environment as attributes, as in verifiers."""

    def __init__(self, agents: dict[str, Agent]) -> None:
        """Take the agents by name."""
        self.__dict__.update(agents)


class Interaction:
    """An open conversation, in which an environment speaks to the policy."""

    def __init__(self, episode: "Playthrough", trace: Any) -> None:
        """Take the episode and its trace; no message has been sent."""
        self._episode, self.trace = episode, trace
        self._begun = self._over = False

    async def turn(self, message: Any = None) -> Any:
        """Send a message to the policy; return its answer with the calls of tools.

        A first turn without a message sends the task's own prompt.
        """
        if self._over:
            raise RuntimeError("the conversation is over; read interaction.trace")
        data = self.trace.task.data
        prompted = not self._begun and data.prompt is not None
        if (message is None) != prompted:
            raise ValueError(
                "the task has a prompt, which the first turn() says, without a message"
                if prompted
                else "turn() needs a message: what the policy is told"
            )
        said = [] if message is None else [_user(message)]
        opening = [] if self._begun else messages_of(data)
        self._begun, before = True, len(self.trace.nodes)
        sampled = await self._episode.segment([*opening, *said])
        self._over = not sampled
        if not sampled:
            return vf.Segment(messages=[], terminated=True)
        new = self.trace.nodes[before:]
        first = next(place for place, node in enumerate(new) if node.sampled)
        return vf.Segment(messages=[node.message for node in new[first:]])

    async def send(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: no message can be sent while a turn is sampled."""
        raise Refusal("it speaks to the policy in the midst of a turn")

    steer = send

    async def close(self) -> Any:
        """End the conversation; return its trace, scored."""
        self.trace.stop("user_closed")
        return await self._episode.finish()


def _user(message: Any) -> Any:
    """Return the argument of `turn` as a user's message."""
    if isinstance(message, list) and len(message) == 1:
        (message,) = message
    if isinstance(message, dict) and message.get("role") == "user":
        message = message.get("content")
    message = getattr(message, "content", message)
    if not isinstance(message, str):
        raise Refusal(f"turn() is given {message!r:.80}, and not one text of a user")
    return vf.UserMessage(content=message)


class Playthrough:
    """One episode: an environment's `run` of a task, which waits at each turn."""

    def __init__(self, loaded: Package, task: Any, shared: Sequence[LiveTools]) -> None:
        """Start `run`."""
        self._environment, self._shared = loaded.environment, shared
        self._asked: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._turns: asyncio.Queue[PolicyTurn | None] = asyncio.Queue()
        self._task, self._tools = task, Toolbox(())
        self._trace: Any = None  # of the conversation, once it has begun
        self._limit: int | None = None  # turns
        self._playing: Any = None  # the conversation's task, which `run` chooses
        self._open = contextlib.AsyncExitStack()
        self._episode = vf.Episode(task=_record(task))
        self._running = asyncio.create_task(self._run())

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Return the tools that the policy has, once it is asked for a turn."""
        return self._tools.schemas

    async def next(self) -> list[Any] | None:
        """Return the messages before the policy's next turn; None: the episode is over.

        Raises:
            Exception: what the environment has raised.
        """
        asked = asyncio.ensure_future(self._asked.get())
        try:
            await asyncio.wait(
                {asked, self._running}, return_when=asyncio.FIRST_COMPLETED
            )
            if asked.done():
                return asked.result()
        finally:
            asked.cancel()
        self._running.result()
        return None

    def tell(self, turn: PolicyTurn | None) -> None:
        """Pass on a turn of the policy; None: the policy takes no more turns."""
        self._turns.put_nowait(turn)

    @property
    def done(self) -> Done:
        """Return the reward of a conversation that is over, and its parts by name."""
        rewards = {name: each for name, each in self._trace.rewards.items() if each}
        if not rewards:
            raise Refusal(f"{type(self._playing).__name__} has recorded no reward")
        metrics = {
            f"metric.{name}": value
            for name, value in self._trace.metrics.items()
            if value is not None
        }
        scores = {name: each.score for name, each in rewards.items()}
        return Done(self._trace.reward, scores | metrics)

    async def close(self) -> None:
        """End what still runs."""
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._running  # its error was raised by `next`, or is not needed

    # -- in the environment's task -----------------------------------------------------

    async def _run(self) -> None:
        environment = self._environment
        agents = {
            name: Agent(self, config)
            for name, config in environment.config
            if isinstance(config, vf.AgentConfig)
        }
        async with self._open:
            await environment.setup(Agents(agents))
            if not any(agent.trainable for agent in agents.values()):
                raise Refusal(f"{type(environment).__name__} trains none of its agents")
            await environment.run(self._task, Agents(agents))
            if not self._episode.traces:
                raise Refusal(
                    f"{type(environment).__name__}.run() has ended without a turn of "
                    f"the policy"
                )
            self._episode.ok = True
            await environment.finalize(self._task, self._episode)

    async def begin(self, task: Any, config: Any) -> Any:
        """Open the tools of a task, and return the trace of the conversation on it."""
        if self._trace is not None:
            raise Refusal(
                "it begins a second conversation, and an episode is one token sequence"
            )
        if type(task) is not type(self._task):  # that class is already checked
            for why in faults_of_task(task):
                raise Refusal(why)
        self._playing, self._limit = task, config.max_turns
        self._trace = Uncounted(
            task=_record(task),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=config),
        )
        await invoke(task.setup, {"trace": self._trace, "runtime": None})
        own = [LiveTools(each) for each in toolsets_of(task)]
        for each in own:
            self._open.push_async_callback(each.close)
            await each.start(task.data)
        # Shared toolsets serve the taskset's own tasks, not others that `run` makes.
        shared = self._shared if isinstance(task, type(self._task)) else ()
        self._tools = Toolbox([*shared, *own])
        self._trace.tools = [
            vf.Tool(**each["function"]) for each in self._tools.schemas
        ]
        return self._trace

    async def segment(self, said: list[Any]) -> int:
        """Let the policy take turns until one calls no tool; return their number."""
        taken = 0
        while not await self._is_stopped():
            self._asked.put_nowait(said)
            turn = await self._turns.get()
            if turn is None:
                self._trace.stop(_CUT)
                break
            calls = turn.calls if self._tools else []
            message = self._message(turn, calls)
            self._commit(said, sampled=False)
            self._commit([message], sampled=True)
            taken += 1
            if not calls:
                break
            said = []
            for call, given in zip(calls, message.tool_calls, strict=True):
                text = await self._tools.answer(call, self._trace)
                said.append(
                    vf.ToolMessage(tool_call_id=given.id, content=text, name=given.name)
                )
        return taken

    async def finish(self) -> Any:
        """Score the conversation; return its trace."""
        task, trace = self._playing, self._trace
        if not trace.ok:
            trace.is_completed = trace.ok = True
            await invoke(task.finalize, {"trace": trace, "runtime": None})
            await task.score(trace)
            self._episode.traces.append(trace)
        return trace

    async def _is_stopped(self) -> bool:
        """Return whether the policy may take no more turns."""
        trace = self._trace
        if self._limit is not None and trace.num_turns >= self._limit:
            trace.stop("max_turns")
        for stop in self._playing.hooks("stop"):
            if trace.stop_condition is None and await call_hook(
                stop, {vf.Trace: trace}
            ):
                trace.stop(stop.__name__)
        return trace.stop_condition is not None

    def _message(self, turn: PolicyTurn, calls: list[Call]) -> Any:
        """Return a turn in verifiers' form."""
        thought, said = turn.thought, turn.said
        if calls:
            thought = thought if said else before_calls(thought)
            said = before_calls(said).strip()
        taken = self._trace.num_turns
        return vf.AssistantMessage(
            content=said or None,
            reasoning_content=thought or None,
            tool_calls=[
                vf.ToolCall(id=f"call_{taken}_{place}", **written(call))
                for place, call in enumerate(calls)
            ]
            or None,
        )

    def _commit(self, messages: Sequence[Any], *, sampled: bool) -> None:
        nodes = self._trace.nodes
        for message in messages:
            parent = len(nodes) - 1 if nodes else None
            nodes.append(
                vf.MessageNode(message=message, parent=parent, sampled=sampled)
            )


def _record(task: Any) -> Any:
    return vf.TraceTask(
        type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
    )
