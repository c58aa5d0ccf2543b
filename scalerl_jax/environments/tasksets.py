"""Tasksets of `verifiers`: their tasks, and reasons why a package cannot be used.

The policy plays like verifiers' harness `null`: a chat, with the tools of the taskset.
What needs more than that is refused by name.  No JAX here.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from scalerl_jax.environments.package_names import read_name
from scalerl_jax.environments.toolsets import Refusal, faults_of

try:
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    from verifiers.v1.configs.agent import (  # pyright: ignore[reportMissingImports]
        agent_config_fields,
    )
    from verifiers.v1.session import (  # pyright: ignore[reportMissingImports]
        hook_boundary,
    )
    from verifiers.v1.utils.decorators import (  # pyright: ignore[reportMissingImports]
        discover_decorated,
    )
except ImportError as error:
    _MISSING = f"{error}; pip install 'verifiers>=0.4,<0.5', or scalerl_jax[verifiers]"
    raise ImportError(_MISSING) from error

_MOST_TASKS = 2**20
_ENVIRONMENT = "env"  # the setting that has those of a package's environment
_OF_RUN = (  # settings of an agent that the run itself has
    *("model", "client", "sampling"),
    *("max_input_tokens", "max_output_tokens", "max_total_tokens"),
)


class Package(NamedTuple):
    """A package's tasks, and how they are played."""

    tasks: list[Any]
    environment: Any  # of verifiers: an `Env`
    by_turns: bool  # the policy may take several


def load(name: str) -> Package:
    """Return the tasks of a package.

    Raises:
        Refusal: it cannot be imported, has no taskset or needs something unsupported.
    """
    package, most, settings = read_name(name)
    module = _import(package)
    if found := _exported(module, vf.Harness):
        raise Refusal(
            f"{package} has {found[0]}, a program of its own that calls the policy "
            f"over HTTP, where what was sampled is written and tokenised again; it is "
            f"not run here"
        )
    if not _exported(module, vf.Taskset):
        old = hasattr(module, "load_environment")
        raise Refusal(
            f"{package} names no subclass of verifiers.v1.Taskset in its __all__"
            + ("; its load_environment() is of verifiers before 0.4" if old else "")
        )
    environment = _environment(package, settings)
    taskset = environment.taskset
    if most is not None:
        taskset = taskset.take(most)
    elif not taskset.bounded:
        raise Refusal(f"{package} has tasks without end; say how many: env:{package}@9")
    tasks = list(itertools.islice(taskset, _MOST_TASKS + 1))
    if not tasks or len(tasks) > _MOST_TASKS:
        raise Refusal(
            f"{package} has {len(tasks) or 'no'} tasks, and must have 1 to "
            f"{_MOST_TASKS:,}"
        )
    own, shared = bool(_exported(module, vf.Env)), shared_toolsets(taskset)
    name_of_task = type(tasks[0]).__name__
    for why in itertools.chain(
        *(faults_of(toolset, name_of_task) for toolset in shared),
        faults_of_task(tasks[0]),
        _of_environment(environment) if own else _of_task_alone(tasks[0]),
        *map(_of_row, tasks),
        () if own else itertools.chain(*map(_of_row_alone, tasks)),
    ):
        raise Refusal(f"{package}: {why}")
    several = own or shared or toolsets_of(tasks[0]) or tasks[0].hooks("stop")
    return Package(tasks, environment, by_turns=bool(several))


def shared_toolsets(taskset: Any) -> list[Any]:
    """Return the toolsets that all tasks of a taskset share."""
    return type(taskset).toolsets(taskset.config)


def toolsets_of(task: Any) -> list[Any]:
    """Return new toolsets of a task's own."""
    return type(task).toolsets(task.config)


def _import(package: str) -> Any:
    try:
        return vf.import_taskset(package)
    except ModuleNotFoundError as error:
        missing = getattr(error.__cause__, "name", None) or package
        raise Refusal(
            f"the module {missing!r} is not installed, which env:{package} needs"
        ) from error
    except (AttributeError, ImportError) as error:
        asked = getattr(error, "obj", None)
        if "verifiers" not in (error.name, getattr(asked, "__name__", "")):
            raise
        raise Refusal(
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


def _environment(package: str, settings: dict[str, Any]) -> Any:
    """Return a package's environment, with its taskset, under these settings."""
    of_taskset = {name: each for name, each in settings.items() if name != _ENVIRONMENT}
    kind = vf.taskset_config_type(package)
    taskset = _config(package, kind, {**of_taskset, "id": package}, settings)
    own = settings.get(_ENVIRONMENT, {})
    if not isinstance(own, dict):
        raise Refusal(
            f"{package}: {_ENVIRONMENT} = {own!r} must be {{'setting': value}}"
        )
    given = {**own, "taskset": taskset}
    return vf.load_environment(
        _config(package, vf.env_config_type(package), given, settings)
    )


def _config(
    package: str, kind: Any, given: dict[str, Any], settings: dict[str, Any]
) -> Any:
    """Return the settings of a package's taskset or environment with these values."""
    try:
        return kind.model_validate(given)
    except ValueError as error:
        listed = getattr(error, "errors", lambda: [])()
        said = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in listed]
        known = sorted({*kind.model_fields} - {"id", "taskset"})
        raise Refusal(
            f"{package} does not take {settings}: {'; '.join(said) or error}; its "
            f"settings are {known}"
        ) from error


# Reasons why tasks cannot be used.


def faults_of_task(task: Any) -> Iterator[str]:
    """Yield what the code of a task needs beside a chat and tools."""
    kind = type(task)
    name = kind.__name__
    if kind.NEEDS_CONTAINER:
        yield f"{name} needs a container, and there is none"
    for hook in ("setup", "finalize", "stage_verifier"):
        own = getattr(kind, hook)
        changed = own is not getattr(vf.Task, hook)
        if changed and (needs_runtime(own) or hook == "stage_verifier"):
            yield f"{name}.{hook}() prepares a container, and there is none"
    for toolset in toolsets_of(task):
        yield from faults_of(toolset, name)
    for stop in task.hooks("stop"):
        if (seen := hook_boundary(stop, allow_trace=True)) is not vf.Trace:
            yield (
                f"{name}.{stop.__name__}() is a @vf.stop that looks at a "
                f"{seen.__name__}, and there is none: let it look at the trace"
            )
    for found in discover_decorated(task, "intercept"):
        yield (
            f"{name}.{found.__name__}() is a @vf.intercept, which changes what was "
            f"sampled or said"
        )
    yield from _of_scoring(task, name)


def _of_scoring(task: Any, name: str) -> Iterator[str]:
    """Yield what scoring a task needs beside the texts of its turns."""
    if task.config.judges:
        yield (
            f"{name} asks a judge of verifiers, over the network; ask one from a "
            f"reward function of your own"
        )
    for function in (*task.hooks("reward"), *task.hooks("metric")):
        if needs_runtime(function):
            yield f"{name}.{function.__name__}() reads a container, and there is none"


def needs_runtime(function: Callable[..., Any]) -> bool:
    """Return whether a function of a task cannot be called without a runtime."""
    found = inspect.signature(function).parameters.get("runtime")
    return found is not None and found.default is inspect.Parameter.empty


def _of_environment(environment: Any) -> Iterator[str]:
    """Yield what an environment needs beside one policy, the run's own."""
    name = type(environment).__name__
    agents = agent_config_fields(environment.config)
    if len(agents) > 1:
        yield (
            f"{name} has the agents {', '.join(agents)}, and an episode is the token "
            f"sequence of one"
        )
    for agent, config in agents.items():
        for field in _OF_RUN:
            if (value := getattr(config, field)) is not None:
                yield (
                    f"{name} has {field} = {value!r} for its agent {agent}, which the "
                    f"settings of the run say"
                )
        if config.harness is not None and config.harness.id != "null":
            yield (
                f"{name} has the harness {config.harness.id!r} for its agent {agent}, "
                f"a program that calls the policy over HTTP"
            )


def _of_task_alone(task: Any) -> Iterator[str]:
    """Yield what a task without an environment lacks."""
    if not task.hooks("reward"):
        yield f"{type(task).__name__} has no @vf.reward"


def _of_row_alone(task: Any) -> Iterator[str]:
    """Yield what the data of a task without an environment lacks."""
    if not task.data.prompt:
        yield f"task {task.data.idx} has no prompt: a user begins, and there is none"


def _of_row(task: Any) -> Iterator[str]:
    """Yield what the data of a task needs beside texts."""
    data = task.data
    for field in ("image", "agent_user", "skills", "artifacts", "network_block"):
        if value := getattr(data, field):
            yield f"task {data.idx} has {field} = {value!r}, and there is no container"
    if "*" not in data.network_allow:
        yield f"task {data.idx} has network_allow, and there is no container"


def messages_of(data: Any) -> list[Any]:
    """Return the messages of a task before the policy's first turn."""
    prompt = data.prompt or []
    turns = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else [*prompt]
    if data.system_prompt is not None and not (turns and turns[0].role == "system"):
        turns.insert(0, vf.SystemMessage(content=data.system_prompt))
    return turns
