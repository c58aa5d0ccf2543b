"""Several processes that train as one: how they start, agree and wait for each other.

JAX is asked here alone which process this is.  With one process, started with
`initialize` or without, every function returns at once and nothing is sent.

What is exchanged are short texts, through the key-value store of JAX's coordination
service: it needs no device, and a process that stays away is named.  All processes
must make the same calls in the same order.
"""

import collections
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax._src import clusters, distributed

from scalerl_jax.types import PyTree

# A process that died is noticed after so long; the others then end with status 134.
HEARTBEAT_S = 60
# One that ended with an error waits so long for the others, then ends them.
SHUTDOWN_S = 60
_calls: collections.Counter[str] = collections.Counter()
_Result = TypeVar("_Result")


def initialize(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_s: float = 300.0,
    heartbeat_s: int = HEARTBEAT_S,
) -> None:
    """Join the other processes; before anything else that asks JAX for devices.

    Without arguments they are found out (TPU VMs, Kubernetes, Slurm, Open MPI).

    Args:
        coordinator: HOST:PORT of process 0; the port must be free.
        num_processes: how many there are.
        process_id: which this is, from 0.
        timeout_s: for all of them to come.
        heartbeat_s: a process that is silent for so long is dead.

    Raises:
        ValueError: an argument is wrong or missing.
        RuntimeError: the coordinator's port is taken.
        TimeoutError: a process did not come; says which.
    """
    given = (coordinator, num_processes, process_id)
    local_devices = None
    if given == (None, None, None):
        coordinator, num_processes, process_id, local_devices = _detect(timeout_s)
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            "--distributed needs --coordinator=HOST:PORT, --num_processes and "
            "--process_id, all three; they are found out on TPU VMs, Kubernetes, "
            "Slurm and Open MPI only"
        )
    from scalerl_jax.parallel import rendezvous  # one process meets nobody

    place = rendezvous.Place(
        coordinator=coordinator, num_processes=num_processes, process_id=process_id
    )
    rendezvous.meet(place, timeout_s=timeout_s)
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        local_device_ids=local_devices,
        initialization_timeout=max(int(timeout_s), 1),
        heartbeat_timeout_seconds=heartbeat_s,
        shutdown_timeout_seconds=SHUTDOWN_S,
    )
    agree(jax.__version__, name="the version of JAX", timeout_s=timeout_s)


def _detect(timeout_s: float) -> tuple[Any, Any, Any, Any]:
    """Coordinator, processes, process id and local devices that a cluster tells."""
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    return detect(None, None, None, None, None, int(timeout_s))


def process_index() -> int:
    """Return the number of this process, from 0."""
    return jax.process_index()


def process_count() -> int:
    """Return the number of processes."""
    return jax.process_count()


def exchange(text: str, *, name: str, timeout_s: float) -> list[str]:
    """Return what each process gives, in their order.

    Raises:
        TimeoutError: a process did not come; says which.
    """
    count = process_count()
    if count == 1:
        return [text]
    client = distributed.global_state.client
    assert client is not None, "several processes have a client"
    folder = f"scalerl_jax/{name}/"
    call, mine = _calls[name], process_index()
    _calls[name] += 1
    key = f"{folder}{call}/"
    client.key_value_set(f"{key}{mine}", text)
    try:
        client.wait_at_barrier(key, int(timeout_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        missing = sorted(set(range(count)) - _given(client, key).keys())
        raise TimeoutError(
            f"{name}: process {', '.join(map(str, missing))} of {count} did not come "
            f"within {timeout_s:g} s; see its log"
        ) from error
    found = _given(client, key)
    # All have left the call before this one.
    if call:
        client.key_value_delete(f"{folder}{call - 1}/{mine}")
    return [found[process] for process in range(count)]


def _given(client: Any, key: str) -> dict[int, str]:
    """Texts that the processes have given so far in one call."""
    entries = client.key_value_dir_get(key)
    return {int(path.rpartition("/")[2]): value for path, value in entries}


def agree(value: str, *, name: str, timeout_s: float) -> None:
    """Refuse to go on unless all processes hold the same value.

    Raises:
        ValueError: one differs from process 0; says which, on every process.
    """
    first, *others = exchange(value, name=name, timeout_s=timeout_s)
    for process, other in enumerate(others, 1):
        if other != first:
            raise ValueError(
                f"{name} is {other} in process {process} and {first} in process 0; "
                f"start all processes with the same code and settings"
            )


def together(action: Callable[[], _Result], *, name: str, timeout_s: float) -> _Result:
    """Return what `action` returns here, once it has succeeded in every process.

    Raises:
        RuntimeError: it failed in one; the error of the first such process, on all.
            With one process its own error is raised as it is.
    """
    if process_count() == 1:
        return action()
    failure, result = "", None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001  raised below, on every process
        failure = str(error) or repr(error)
    for process, text in enumerate(exchange(failure, name=name, timeout_s=timeout_s)):
        if text:
            raise RuntimeError(f"process {process}: {text}")
    return result  # type: ignore[return-value]


def put_global(tree: PyTree, shardings: PyTree) -> PyTree:
    """Host arrays, the same in every process, on devices of all of them.

    Each process sends the parts of its own devices.  Does not wait.  `shardings` may
    be a prefix of the tree, as for `jax.device_put`.
    """
    if process_count() == 1:
        return jax.device_put(tree, shardings)
    return jax.tree.map(
        lambda leaf, sharding: jax.make_array_from_callback(
            leaf.shape, sharding, leaf.__getitem__
        ),
        tree,
        jax.tree.broadcast(shardings, tree),
    )
