"""Groups as flat arrays and JSON rows, for a checkpoint; no pickle.

Arrays must have the types that `types.Rollout` and `types.Prompt` state, and what
goes to JSON must be JSON, so that each group reads back exactly as it was.
"""

import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from scalerl_jax.learner.manifest import Folder
from scalerl_jax.types import Group, Prompt, Rollout

_FILES = ("groups.npz", "groups.json")
_ROLLOUT_ARRAYS = {
    "completion_tokens": np.dtype(np.int32),
    "completion_mask": np.dtype(np.bool_),
    "behavior_logprobs": np.dtype(np.float32),
    "policy_versions": np.dtype(np.int32),
}

# What a JSON file holds; `check_json` checks it, a type cannot.
Json = Any


def flatten(
    groups: Sequence[Group],
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """All arrays laid end to end, with the offsets of each; the rest as JSON rows."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    prompts = [group.prompt.tokens for group in groups]
    completions = [rollout.completion_tokens for rollout in rollouts]
    arrays = {
        "prompt_tokens": _join(prompts, prompts, "prompt.tokens", np.dtype(np.int32)),
        "prompt_offsets": _offsets(prompts),
        "completion_offsets": _offsets(completions),
    }
    for name, dtype in _ROLLOUT_ARRAYS.items():
        parts = [getattr(rollout, name) for rollout in rollouts]
        arrays[name] = _join(parts, completions, name, dtype)
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
    return {
        "ticket": int(group.ticket),
        "finished_version": int(group.finished_version),
        "detail": group.detail,
        "prompt": {
            "prompt_id": int(prompt.prompt_id),
            "epoch": int(prompt.epoch),
            "task": prompt.task,
            "text": prompt.text,
            "reference": prompt.reference,
        },
        "rollouts": [
            {
                "cut_off": bool(rollout.cut_off),
                "interrupted": bool(rollout.interrupted),
                "reward": float(rollout.reward),
                "passed": bool(rollout.passed),
                "judged": bool(rollout.judged),
                "status": rollout.status,
            }
            for rollout in group.rollouts
        ],
    }


def unflatten(
    arrays: dict[str, np.ndarray], rows: list[dict[str, Any]]
) -> tuple[Group, ...]:
    """The groups that `flatten` was given."""
    prompts = iter(np.split(arrays["prompt_tokens"], arrays["prompt_offsets"][1:-1]))
    cuts = arrays["completion_offsets"][1:-1]
    parts = {name: iter(np.split(arrays[name], cuts)) for name in _ROLLOUT_ARRAYS}
    return tuple(
        Group(
            ticket=row["ticket"],
            finished_version=row["finished_version"],
            detail=row.get("detail", ""),  # older checkpoints have none
            prompt=Prompt(tokens=next(prompts).copy(), **row["prompt"]),
            rollouts=tuple(
                Rollout(
                    **{name: next(part).copy() for name, part in parts.items()}, **rest
                )
                for rest in row["rollouts"]
            ),
        )
        for row in rows
    )


def write(
    folder: Folder, arrays: dict[str, np.ndarray], rows: list[dict[str, Any]]
) -> None:
    """Write what `flatten` made as files in a folder."""
    with (folder / _FILES[0]).open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    (folder / _FILES[1]).write_text(json.dumps(rows))


def read(folder: Folder) -> tuple[Group, ...]:
    """The groups whose files are in a folder."""
    content = io.BytesIO((folder / _FILES[0]).read_bytes())
    with np.load(content, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return unflatten(arrays, json.loads((folder / _FILES[1]).read_bytes()))


def check_json(value: Json, *, name: str) -> None:
    """Refuse what would read back as something else: tuples, integer keys, arrays."""
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
