"""Rollouts that a run has trained on: a file of their token ids, and a choice of them.

A row of train_rollouts.jsonl is one rollout.  Its ids are the sampled ones, so that
learning from them needs no tokenizer.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flax import struct

from scalerl_jax.formats.bounded import read_lines
from scalerl_jax.formats.reading import parse_json
from scalerl_jax.types import Group

Choice = Literal["passed", "best"]


def rollout_rows(groups: Iterable[Group], *, step: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each rollout of the groups that step `step` has trained on."""
    for group in groups:
        for rollout in group.rollouts:
            forced = np.flatnonzero(~rollout.completion_mask).tolist()
            yield {
                "step": step,
                "task": group.prompt.task,
                "prompt_id": group.prompt.prompt_id,
                "reward": rollout.reward,
                "passed": rollout.passed,
                "judged": rollout.judged,
                "status": rollout.status,
                "cut_off": rollout.cut_off,
                "prompt_tokens": group.prompt.tokens.tolist(),
                "completion_tokens": rollout.completion_tokens.tolist(),
                "forced": forced,  # the completion's indices that were not sampled
            }


@struct.dataclass(kw_only=True)
class KeptRollout:
    """A rollout of the file."""

    prompt_tokens: np.ndarray  # int32 [P]
    completion_tokens: np.ndarray  # int32 [T]
    completion_mask: np.ndarray  # bool [T], False on forced tokens
    step: int
    reward: float
    passed: bool
    judged: bool


def read_rollouts(path: Path) -> Iterator[KeptRollout]:
    """Yield the rollouts of a train_rollouts.jsonl; skip an incomplete last line.

    Raises:
        ValueError: a line is no rollout; names it.
    """
    for number, line in enumerate(read_lines(path), 1):
        if not line.endswith(b"\n"):
            return  # a kill came in the middle of it
        try:
            yield _rollout(parse_json(line))
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            raise ValueError(
                f"{path}, line {number}, is no rollout of a run ({error!r}); remove it"
            ) from error


def _rollout(row: dict[str, Any]) -> KeptRollout:
    prompt, completion = (
        np.array(row[name], np.int32) for name in ("prompt_tokens", "completion_tokens")
    )
    if not prompt.size or not completion.size or {prompt.ndim, completion.ndim} != {1}:
        raise ValueError("its token ids are no two lists")
    mask = np.ones(len(completion), bool)
    mask[np.array(row["forced"], np.int64)] = False
    for name, kind in (("step", int), ("passed", bool), ("judged", bool)):
        if type(row[name]) is not kind:
            raise ValueError(f"{name!r} is no {kind.__name__}")
    return KeptRollout(
        prompt_tokens=prompt,
        completion_tokens=completion,
        completion_mask=mask,
        step=row["step"],
        reward=float(row["reward"]),
        passed=row["passed"],
        judged=row["judged"],
    )


def chosen(
    rollouts: Iterable[KeptRollout], *, choice: Choice, per_prompt: int
) -> list[KeptRollout]:
    """Return the rollouts to learn from, prompt by prompt in the order they came.

    Of each prompt these are the ones that passed, or with "best" those of its highest
    reward, passed or not; each text once, and `per_prompt` of them at most (0: all):
    first higher rewards, then later steps.  Unjudged rollouts do not count.
    """
    by_prompt: dict[bytes, dict[bytes, KeptRollout]] = {}
    for each in rollouts:
        if each.judged and each.completion_mask.any():
            alike = by_prompt.setdefault(each.prompt_tokens.tobytes(), {})
            alike[each.completion_tokens.tobytes()] = each
    found: list[KeptRollout] = []
    for alike in by_prompt.values():
        found += _of_prompt([*alike.values()], choice, per_prompt)
    return found


def _of_prompt(
    rollouts: Sequence[KeptRollout], choice: Choice, per_prompt: int
) -> list[KeptRollout]:
    if choice == "passed":
        kept = [each for each in rollouts if each.passed]
    else:
        highest = max(each.reward for each in rollouts)
        kept = [each for each in rollouts if each.reward == highest]
    kept.sort(key=lambda each: (-each.reward, -each.step))
    return kept[: per_prompt or None]
