"""Several processes that train as one: how they agree and wait for each other.

JAX is asked here alone which process this is.  With one process, every function returns
at once and nothing is sent; how several of them start is said in `rendezvous`.

Processes exchange short texts by the store of JAX's coordination service: it needs no
device, and a process that stays away is named.  All must make the same calls in the
same order.
"""

import collections
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax._src import distributed

from scalerl_jax.types import PyTree

_Result = TypeVar("_Result")
_calls: collections.Counter[str] = collections.Counter()


def process_index() -> int:
    """Return the number of this process, from 0."""
    return jax.process_index()


def process_count() -> int:
    """Return the number of processes."""
    return jax.process_count()


def exchange(text: str, *, name: str, timeout_s: float) -> list[str]:
    """Exchange a text with the other processes; return the texts of all, in order.

    Raises:
        TimeoutError: a process did not come; says which.
    """
    mine, count = process_index(), process_count()
    if count == 1:
        return [text]

    return _by_store(text, process=mine, count=count, name=name, timeout_s=timeout_s)


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
    """Run `action` in every process; return its result here once all have succeeded.

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
    """Put host arrays, the same in every process, on devices of all of them.

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


def _by_store(
    text: str, *, process: int, count: int, name: str, timeout_s: float
) -> list[str]:
    """Exchange a text with the other processes; return the texts of all, in order.

    This process is number `process` of `count`.

    Raises:
        TimeoutError: a process did not come; says which.
    """
    client = distributed.global_state.client
    assert client is not None, "several processes have a client"
    folder = f"scalerl_jax/{name}/"
    call = _calls[name]
    _calls[name] += 1
    key = f"{folder}{call}/"
    client.key_value_set(f"{key}{process}", text)
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
        client.key_value_delete(f"{folder}{call - 1}/{process}")
    return [found[number] for number in range(count)]


def _given(client: Any, key: str) -> dict[int, str]:
    """Texts that the processes have given so far in one call."""
    entries = client.key_value_dir_get(key)
    return {int(path.rpartition("/")[2]): value for path, value in entries}
