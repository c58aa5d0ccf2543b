"""The contents of a checkpoint: arrays of a train state, and groups.  No pickle.

Arrays are written by orbax, and described by name.  `ArrayFiles.copy` returns when the
state may change or be donated; the files are whole only once its futures are done,
which another thread may wait for.

Groups are flat arrays and JSON rows.  Their arrays must have the types that
`types.Rollout` and `types.Prompt` state, and what goes to JSON must be JSON, so that
each group reads back unchanged.
"""

import asyncio
import dataclasses
import io
import itertools
import json
import logging
import re
import zipfile
import zlib
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from scalerl_jax.batching.replay import join_experts, split_experts
from scalerl_jax.formats.bounded import MOST_WHOLE
from scalerl_jax.formats.reading import read_value
from scalerl_jax.learner.places import Folder
from scalerl_jax.parallel import multihost
from scalerl_jax.types import (
    TOKEN_ARRAYS,
    Group,
    Prompt,
    PyTree,
    Rollout,
    Turn,
    rollouts_of,
)
from scalerl_jax.weights.shards import named_leaves

STATE, HOST = "state", "host.json"  # the arrays' folder, the host's state
_FILES = ("groups.npz", "groups.json")
_OTHERS_S = 60.0  # for the other arrays, once one of them cannot be written

_KINDS: dict[Any, tuple[type, ...]] = {  # of a field -> of its value in JSON
    **{bool: (bool,), int: (int,), str: (str,), float: (float, int)},
    **{dict[str, Any]: (dict,), dict[str, float | None]: (dict,)},
}
# What a library raises at files of another form.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, EOFError)
_MALFORMED += (RuntimeError, zipfile.BadZipFile, zlib.error)

# A value that a JSON file can hold; no type says so, hence `check_json`.
Json = Any


class ArrayFiles:
    """Writes the arrays of a state, with shardings, in a directory."""

    def __init__(self) -> None:
        """Open orbax's handler; its threads run until `close`."""
        import orbax.checkpoint as ocp  # a tenth of what importing a run takes
        from orbax.checkpoint._src import asyncio_utils

        for library in ("absl", "asyncio"):  # used by orbax
            logging.getLogger(library).addFilter(_is_no_echo)
        asyncio_utils._run_sync_via_new_loop = _run_to_the_end
        # OCDBT packs the arrays into a few files; weights do not compress.
        self._handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True, use_compression=False
        )

    def copy(self, directory: Folder, state: PyTree) -> list[Any]:
        """Copy a state off the devices and begin to write it; return orbax's futures.

        On CPU devices the copy is a view, which keeps its buffers from being donated.
        """
        import orbax.checkpoint as ocp  # as above
        from orbax.checkpoint._src import asyncio_utils

        futures = asyncio_utils.run_sync(
            self._handler.async_save(
                epath.Path(directory), args=ocp.args.PyTreeSave(state)
            )
        )
        return futures or []

    def finalize(self, directory: Folder) -> None:
        """Join what several processes wrote, in one of them."""
        self._handler.finalize(epath.Path(directory))

    def close(self) -> None:
        """Stop the threads that write."""
        self._handler.close()


def _run_to_the_end(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end; after a failure wait for the tasks it has begun.

    Otherwise each array that fails after the first one finds the loop closed, and its
    thread writes a traceback to stderr.
    """
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(work)
        except Exception:
            if others := asyncio.all_tasks(loop):
                loop.run_until_complete(asyncio.wait(others, timeout=_OTHERS_S))
            raise
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Return False for a log record that only repeats an error that `write` raises."""
    echoes = "_SignalingThread|async_serialize|in OCDBT database"
    return not re.search(echoes, record.getMessage())


def describe(tree: PyTree) -> dict[str, list[Any]]:
    """Return dtype and shape of every array by its name, as JSON values."""
    return {
        name: [str(leaf.dtype), list(leaf.shape)]
        for name, leaf in named_leaves(tree, separator=".").items()
    }


def check_processes(state: PyTree) -> None:
    """Refuse arrays that live on only one of several processes."""
    count = multihost.process_count()
    for name, leaf in named_leaves(state, separator=".").items():
        if count > 1 and leaf.is_fully_addressable:
            raise ValueError(
                f"{name} is on the devices of one process, which a checkpoint of "
                f"{count} cannot hold; put it on a mesh of all of them"
            )


def flatten(
    groups: Sequence[Group],
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Lay all arrays end to end, with the offsets of each; make the rest JSON rows."""
    rollouts = rollouts_of(groups)
    prompts = [group.prompt.tokens for group in groups]
    completions = [rollout.completion_tokens for rollout in rollouts]
    arrays = {
        "prompt_tokens": _join(prompts, prompts, "prompt.tokens", np.dtype(np.int32)),
        "prompt_offsets": _offsets(prompts),
        "completion_offsets": _offsets(completions),
    }
    for name, dtype in TOKEN_ARRAYS.items():
        parts = [getattr(rollout, name) for rollout in rollouts]
        arrays[name] = _join(parts, completions, name, dtype)
    if any(rollout.experts is not None for rollout in rollouts):
        arrays |= join_experts(groups)
    return arrays, [_group_row(group) for group in groups]


def _join(
    parts: Sequence[np.ndarray],
    like: Sequence[np.ndarray],
    name: str,
    dtype: np.dtype[Any],
) -> np.ndarray:
    for part, other in zip(parts, like, strict=True):
        if part.dtype != dtype or part.ndim != 1 or part.shape != other.shape:
            raise ValueError(
                f"{name} is {part.dtype}{list(part.shape)}; it must be "
                f"{dtype}[{other.shape[0]}] to be saved"
            )
    return np.concatenate([np.empty(0, dtype), *parts])


def _offsets(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.cumsum([0, *(part.shape[0] for part in parts)], dtype=np.int64)


def _group_row(group: Group) -> dict[str, Any]:
    prompt = group.prompt
    check_json(prompt.reference, name=f"reference of prompt {prompt.prompt_id}")
    return _row(group, "prompt", "rollouts") | {
        "prompt": _row(prompt, "tokens"),
        "rollouts": [
            _row(rollout, "experts", *TOKEN_ARRAYS) for rollout in group.rollouts
        ],
    }


def _row(record: Any, *other: str) -> dict[str, Any]:
    """Return the fields of a record but for `other` ones, as plain Python values."""
    names = [field.name for field in dataclasses.fields(record)]
    values = {name: getattr(record, name) for name in names if name not in other}
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in values.items()
    }


def unflatten(
    arrays: dict[str, np.ndarray], rows: list[dict[str, Any]]
) -> tuple[Group, ...]:
    """Return the groups that `flatten` was given."""
    prompts = iter(np.split(arrays["prompt_tokens"], arrays["prompt_offsets"][1:-1]))
    cuts = arrays["completion_offsets"][1:-1]
    parts = {name: iter(np.split(arrays[name], cuts)) for name in TOKEN_ARRAYS}
    experts: Iterator[np.ndarray | None] = itertools.repeat(None)
    if "experts" in arrays:
        experts = iter(split_experts(arrays))
    return tuple(
        Group(  # older checkpoints lack some fields, which have defaults
            **row
            | {
                "prompt": Prompt(tokens=next(prompts).copy(), **row["prompt"]),
                "rollouts": tuple(
                    Rollout(
                        **{name: next(part).copy() for name, part in parts.items()},
                        **rest | {"turns": _turns(rest)},
                        experts=next(experts),
                    )
                    for rest in row["rollouts"]
                ),
            }
        )
        for row in rows
    )


def _turns(row: dict[str, Any]) -> tuple[Turn, ...]:
    """Return a rollout's turns; checkpoints of before there were any have none."""
    return tuple(Turn(*each) for each in row.get("turns", ()))


def write_groups(
    folder: Folder, arrays: dict[str, np.ndarray], rows: list[dict[str, Any]]
) -> None:
    """Write the results of `flatten` as files in a folder."""
    with (folder / _FILES[0]).open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    (folder / _FILES[1]).write_text(json.dumps(rows))


def read_groups(folder: Folder) -> tuple[Group, ...]:
    """Read the groups that `write_groups` wrote in a folder.

    Raises:
        ValueError: the files hold something else.
        OSError: they cannot be read.
    """
    content = io.BytesIO((folder / _FILES[0]).read_bytes())
    rows = read_value(folder / _FILES[1], most=MOST_WHOLE)
    try:
        with np.load(content, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        groups = unflatten(arrays, rows)
        _check_groups(groups, arrays)
    except _MALFORMED as error:
        raise ValueError(
            f"{folder / _FILES[0]} and {_FILES[1]} are not groups as they are saved "
            f"({error!r}); put back a copy of this checkpoint, or remove it"
        ) from error
    return groups


def _check_groups(groups: Sequence[Group], arrays: dict[str, np.ndarray]) -> None:
    """Refuse what reads as groups, and is not what `flatten` makes of them."""
    for name, array in flatten(groups)[0].items():
        given = arrays[name]
        if (given.dtype, given.tobytes()) != (array.dtype, array.tobytes()):
            raise ValueError(f"{name} is {given.dtype}{list(given.shape)}")
    prompts = [group.prompt for group in groups]
    for record in (*groups, *prompts, *rollouts_of(groups)):
        for field in dataclasses.fields(record):
            kinds, value = _KINDS.get(field.type), getattr(record, field.name)
            if kinds and type(value) not in kinds:
                raise TypeError(f"{field.name} is {value!r}")


def check_json(value: Json, *, name: str) -> None:
    """Refuse values that JSON reads back changed: tuples, integer keys, arrays."""
    if type(value) is dict:
        for key, part in value.items():
            if type(key) is not str:
                raise ValueError(f"{name} has the key {key!r}; JSON keys are strings")
            check_json(part, name=f"{name}.{key}")
    elif type(value) is list:
        for place, part in enumerate(value):
            check_json(part, name=f"{name}[{place}]")
    elif value is not None and type(value) not in (str, bool, int, float):
        raise ValueError(
            f"{name} = {value!r} is of type {type(value).__name__}, which is not a "
            f"JSON value; a checkpoint would give back another type"
        )
