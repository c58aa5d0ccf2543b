"""Tasks of `verifiers` in a verifier process: their prompts, rewards and episodes.

A reward function scores a task of one turn; a task that may take several turns has an
environment for each episode, like a user's own (`own`, `instances`).  No JAX here.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from scalerl_jax.environments.conversations import Playthrough, PolicyTurn
from scalerl_jax.environments.tasksets import load, messages_of, shared_toolsets
from scalerl_jax.environments.toolsets import LiveTools, Refusal
from scalerl_jax.environments.verdict import Done, More


class Tasksets:
    """Tasks by their names and places, in a verifier process."""

    def __init__(self, names: Sequence[str], *, end_of_thinking: str) -> None:
        """Load the tasks; a completion's thinking ends with the text, if it is any."""
        self._loaded = {name: load(name) for name in names}
        self._ready: dict[str, asyncio.Task[list[LiveTools]]] = {}
        self.end_of_thinking = end_of_thinking

    async def score(self, prompt: str, completion: str, reference: Any) -> Done:
        """Return the reward of a task that is one turn, and its parts by name."""
        played = self.make()
        try:
            await played.begin(prompt, reference)
            return await played.end(completion)
        finally:
            await played.close()

    def make(self) -> "Played":
        """Return the environment of an episode."""
        return Played(self)

    async def begin(self, reference: Any) -> Playthrough:
        """Begin the conversation on the task of a prompt.

        Raises:
            Refusal: the prompt is of no task, or the package's task has changed.
        """
        if not isinstance(reference, dict) or "taskset" not in reference:
            raise Refusal("the prompt is of no package; name env:PACKAGE in its place")
        name, place = reference["taskset"], reference["task"]
        if name not in self._loaded:
            self._loaded[name] = load(name)
        loaded = self._loaded[name]
        if place >= len(loaded.tasks) or loaded.tasks[place].hash != reference["hash"]:
            raise Refusal(
                f"task {place} of {name} is not the one whose prompt was asked; the "
                f"package must give the same tasks each time"
            )
        return Playthrough(loaded, loaded.tasks[place], await self._prepared(name))

    async def _prepared(self, name: str) -> list[LiveTools]:
        """Start what a package's episodes share, once; return its toolsets."""
        if name not in self._ready:
            task = asyncio.create_task(self._prepare(self._loaded[name].environment))
            self._ready[name] = task
        return await asyncio.shield(self._ready[name])

    async def _prepare(self, environment: Any) -> list[LiveTools]:
        served = [LiveTools(each) for each in shared_toolsets(environment.taskset)]
        for each in served:
            await each.start()
        await environment.start()
        return served

    async def rows(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the prompts of a package's tasks with their indices, never an answer.

        A task begins here, since only then its environment or toolset gives messages.
        """
        loaded = self._loaded[name]
        for place, task in enumerate(loaded.tasks):
            reference = {"taskset": name, "task": place, "hash": task.hash}
            said, tools = messages_of(task.data), []
            if loaded.by_turns:
                begun = await self.begin(reference)
                said, tools = await begun.next(), begun.tools
                await begun.close()
                assert said is not None, "an episode without a turn raises"
                reference["said"] = _digest(said)
                reference["unlike"] = _own_hash(task)
            yield {
                "id": str(place),
                "messages": [each.model_dump(exclude_none=True) for each in said],
                "verifier": "own",
                "reference": reference,
                "tools": tools,
            }


class Played:
    """The environment of one episode, for the task of its prompt."""

    def __init__(self, tasksets: Tasksets) -> None:
        """Begin with no task."""
        self._tasksets = tasksets
        self._episode: Playthrough | None = None

    async def begin(self, prompt: str, reference: Any) -> None:
        """Run the task's environment to the policy's first turn.

        Raises:
            Refusal: its first messages differ from those in the prompt.
        """
        self._episode = await self._tasksets.begin(reference)
        try:
            said = await self._episode.next()
            assert said is not None, "an episode without a turn raises"
            if reference.get("said", _digest(said)) != _digest(said):
                raise Refusal(
                    "it begins otherwise than when its prompt was written; an episode "
                    "of a package must begin the same each time"
                )
        except BaseException:
            await self.close()
            raise

    async def step(self, completion: str) -> More | Done:
        """Answer a turn with tools' results, the environment's text, or the end."""
        episode = self._begun
        episode.tell(PolicyTurn.read(completion, self._tasksets.end_of_thinking))
        said = await episode.next()
        if said is None:
            return episode.done
        (role,) = {each.role for each in said}
        return More("\n".join(each.content for each in said), role=role)

    async def end(self, completion: str) -> Done:
        """Return the end of an episode of one turn."""
        done = await self.step(completion)
        assert isinstance(done, Done), "a task that may go on is played by turns"
        return done

    async def cut(self) -> Done:
        """Return the end of an episode that has no room for another turn."""
        self._begun.tell(None)
        said = await self._begun.next()
        assert said is None, "a stopped trace asks for no turn"
        return self._begun.done

    async def close(self) -> None:
        """End what still runs of the episode."""
        if self._episode is not None:
            await self._episode.close()

    @property
    def _begun(self) -> Playthrough:
        assert self._episode is not None, "begin comes first"
        return self._episode


def _digest(messages: Sequence[Any]) -> str:
    """Return a hash of these messages."""
    said = [each.model_dump(mode="json", exclude_none=True) for each in messages]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _own_hash(task: Any) -> str:
    """Return a task's hash without its index, to distinguish tasks of one text."""
    return task.with_data(idx=None).hash


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    """Yield the prompts of a package's tasks, as `Tasksets.rows` says."""
    with asyncio.Runner() as runner:
        rows = Tasksets((name,), end_of_thinking="").rows(name)

        async def following() -> dict[str, Any] | None:
            return await anext(rows, None)

        while (row := runner.run(following())) is not None:
            yield row
