"""Exchange of texts among processes, by the store of JAX's coordination service.

It needs no device, and a process that stays away is named.
"""

import collections
from typing import Any

import jax
from jax._src import distributed

_calls: collections.Counter[str] = collections.Counter()


def exchange(
    text: str, *, process: int, count: int, name: str, timeout_s: float
) -> list[str]:
    """Return what each of `count` processes gives; this one is number `process`.

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
