"""Tasksets of `verifiers`, in processes of their own: their prompts, and their scores.

A task is one turn of the policy, as with the package's harness `null` without tools;
whatever asks for more is refused by name.  No JAX here.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from scalerl_jax.environments.package_names import read_name
from scalerl_jax.environments.verdict import Done

try:
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    from verifiers.v1.state import state_cls  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.decorators import (  # pyright: ignore[reportMissingImports]
        discover_decorated,
    )
except ImportError as error:
    _MISSING = f"{error}; pip install 'verifiers>=0.4,<0.5', or scalerl_jax[verifiers]"
    raise ImportError(_MISSING) from error

_MOST_TASKS = 2**20
_HOOKS = ("setup", "finalize", "stage_verifier")  # of a task, for its container


class Refused(ValueError):
    """A package, or what it does with a turn, cannot be used; says why."""


class OneTurn(vf.Trace):
    """A trace of one turn that no server has sampled: none of its tokens is counted."""

    def _unknown(self, name: str) -> NoReturn:
        raise Refused(f"it reads trace.{name}, which is not known of a single turn")

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


class Tasksets:
    """Tasks by their names and places, in a verifier process that scores them."""

    def __init__(self, names: Sequence[str], *, end_of_thinking: str) -> None:
        """Load the tasks; a completion's thinking ends with the text, if it is any."""
        self._tasks = {name: load(name) for name in names}
        self._end_of_thinking = end_of_thinking

    async def score(self, prompt: str, completion: str, reference: Any) -> Done:
        """Return the task's reward, and its rewards and metrics by name."""
        task = self._task(reference)
        trace = self._trace(task, completion)
        await task.score(trace)
        rewards = {name: each.score for name, each in trace.rewards.items() if each}
        if not rewards:
            raise Refused(f"{type(task).__name__} has recorded no reward")
        metrics = {
            f"metric.{name}": value
            for name, value in trace.metrics.items()
            if value is not None
        }
        return Done(trace.reward, rewards | metrics)

    def _task(self, reference: Any) -> Any:
        """Return the task of a prompt.

        Raises:
            Refused: the prompt is of none, or the package has another in its place.
        """
        if not isinstance(reference, dict) or "taskset" not in reference:
            raise Refused("the prompt is of no package; name env:PACKAGE in its place")
        name, place = reference["taskset"], reference["task"]
        if name not in self._tasks:
            self._tasks[name] = load(name)
        tasks = self._tasks[name]
        if place >= len(tasks) or tasks[place].hash != reference["hash"]:
            raise Refused(
                f"task {place} of {name} is not the one whose prompt was asked; the "
                f"package must give the same tasks each time"
            )
        return tasks[place]

    def _trace(self, task: Any, completion: str) -> Any:
        """Return the trace of a turn: what was asked, what was thought and said."""
        thought, end, said = completion, self._end_of_thinking, ""
        if end in completion:
            thought, _, said = completion.rpartition(end) if end else ("", "", thought)
        answer = vf.AssistantMessage(
            content=said or None, reasoning_content=thought or None
        )
        nodes: list[Any] = []
        for message in (*_messages(task.data), answer):
            parent = len(nodes) - 1 if nodes else None
            sampled = message is answer
            nodes.append(
                vf.MessageNode(message=message, parent=parent, sampled=sampled)
            )
        return OneTurn(
            task=vf.TraceTask(
                type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
            ),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=nodes,
            is_completed=True,
            ok=True,
            stop_condition="agent_completed",
        )


def load(name: str) -> list[Any]:
    """Return the tasks of a package.

    Raises:
        Refused: it cannot be imported, has no taskset or wants more than one turn.
    """
    package, most, settings = read_name(name)
    module = _import(package)
    for kind, what in (
        (vf.Env, "an environment of its own, perhaps of several turns"),
        (vf.Harness, "a program of its own that calls the policy"),
    ):
        if found := _exported(module, kind):
            raise Refused(f"{package} has {found[0]}, {what}, which is not run here")
    if not _exported(module, vf.Taskset):
        old = hasattr(module, "load_environment")
        raise Refused(
            f"{package} names no subclass of verifiers.v1.Taskset in its __all__"
            + ("; its load_environment() is of verifiers before 0.4" if old else "")
        )
    taskset = vf.load_taskset(_config(package, settings))
    if most is not None:
        taskset = taskset.take(most)
    elif not taskset.bounded:
        raise Refused(f"{package} has tasks without end; say how many: env:{package}@9")
    tasks = list(itertools.islice(taskset, _MOST_TASKS + 1))
    if not tasks or len(tasks) > _MOST_TASKS:
        raise Refused(
            f"{package} has {len(tasks) or 'no'} tasks, and must have 1 to "
            f"{_MOST_TASKS:,}"
        )
    for why in (*_of_class(taskset, tasks[0]), *itertools.chain(*map(_of_row, tasks))):
        raise Refused(f"{package}: {why}")
    return tasks


def _import(package: str) -> Any:
    try:
        return vf.import_taskset(package)
    except ModuleNotFoundError as error:
        missing = getattr(error.__cause__, "name", None) or package
        raise Refused(
            f"the module {missing!r} is not installed, which env:{package} needs"
        ) from error
    except (AttributeError, ImportError) as error:
        asked = getattr(error, "obj", None)
        if "verifiers" not in (error.name, getattr(asked, "__name__", "")):
            raise
        raise Refused(
            f"{package} is for verifiers before 0.4, whose environments are not those "
            f"of 0.4: {error}"
        ) from error


def _exported(module: Any, kind: type) -> list[str]:
    """Return the names of a package's subclasses of a class."""
    found = (getattr(module, name, None) for name in getattr(module, "__all__", ()))
    return [
        each.__name__
        for each in found
        if isinstance(each, type) and issubclass(each, kind) and each is not kind
    ]


def _config(package: str, settings: dict[str, Any]) -> Any:
    """Return the settings of a package's taskset."""
    kind = vf.taskset_config_type(package)
    try:
        return kind.model_validate({**settings, "id": package})
    except ValueError as error:
        listed = getattr(error, "errors", lambda: [])()
        said = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in listed]
        known = sorted({*kind.model_fields} - {"id"})
        raise Refused(
            f"{package} does not take {settings}: {'; '.join(said) or error}; its "
            f"settings are {known}"
        ) from error


# Reasons why tasks cannot be used.  Environments of several turns begin here.


def _of_class(taskset: Any, task: Any) -> Iterator[str]:
    """Yield what the code of a taskset asks for beside one turn."""
    kind = type(task)
    name = kind.__name__
    if kind.NEEDS_CONTAINER:
        yield f"{name} needs a container, and there is none"
    for hook in _HOOKS:
        if getattr(kind, hook) is not getattr(vf.Task, hook):
            yield f"{name}.{hook}() prepares a container, and there is none"
    if type(taskset).toolsets(taskset.config) or kind.toolsets(task.config):
        yield f"{name} gives the policy tools, and it has one turn"
    for kept in ("stop", "intercept"):
        for found in discover_decorated(task, kept):
            yield f"{name}.{found.__name__}() is a @vf.{kept}, of several turns"
    yield from _of_scoring(task, name)


def _of_scoring(task: Any, name: str) -> Iterator[str]:
    """Yield what scoring a task asks for beside the text of a turn."""
    if task.config.judges:
        yield (
            f"{name} asks a judge of verifiers, over the network; ask one from a "
            f"reward function of your own"
        )
    rewards = task.hooks("reward")
    if not rewards:
        yield f"{name} has no @vf.reward"
    for function in (*rewards, *task.hooks("metric")):
        if _needs_runtime(function):
            yield f"{name}.{function.__name__}() reads a container, and there is none"


def _needs_runtime(function: Callable[..., Any]) -> bool:
    """Return whether `Task.score` would leave a function out for want of a runtime."""
    found = inspect.signature(function).parameters.get("runtime")
    return found is not None and found.default is inspect.Parameter.empty


def _of_row(task: Any) -> Iterator[str]:
    """Yield what the data of a task asks for beside a text and one turn."""
    data = task.data
    if not data.prompt:
        yield f"task {data.idx} has no prompt: a user begins, and there is none"
    for field in ("image", "agent_user", "skills", "artifacts", "network_block"):
        if value := getattr(data, field):
            yield f"task {data.idx} has {field} = {value!r}, and there is no container"
    if "*" not in data.network_allow:
        yield f"task {data.idx} has network_allow, and there is no container"


# Rows.


def _messages(data: Any) -> list[Any]:
    """Return what a task says before the policy does."""
    turns = (
        [vf.UserMessage(content=data.prompt)]
        if isinstance(data.prompt, str)
        else [*data.prompt]
    )
    if data.system_prompt is not None and turns[0].role != "system":
        turns.insert(0, vf.SystemMessage(content=data.system_prompt))
    return turns


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    """Yield the prompts of a package's tasks, and where each is: never an answer."""
    for place, task in enumerate(load(name)):
        turns = _messages(task.data)
        yield {
            "id": str(place),
            "messages": [turn.model_dump(exclude_none=True) for turn in turns],
            "verifier": "own",
            "reference": {"taskset": name, "task": place, "hash": task.hash},
        }
