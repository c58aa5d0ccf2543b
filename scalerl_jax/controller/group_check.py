"""The check of finished groups before the controller accepts them.

A generator may be another, faulty machine.  Its groups are compared with their orders
and with the limits of the run before anything uses them.
"""

import contextlib
import dataclasses
import json
import math
import typing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from scalerl_jax.contract import Order
from scalerl_jax.environments.verdict import Status
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.types import TOKEN_ARRAYS, Group, Prompt, Rollout, Turn

MOST_BAD = 3  # bad groups of one replica, after which it is replaced

_STATUSES = frozenset(typing.get_args(Status))
_MOST_LOGPROB = 1e-3  # nats; largest log-probability above 0 by rounding
_TURN = [int, int, bool]
_FLAGS = ("cut_off", "interrupted", "passed", "judged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupCheck:
    """The limits that every group of a run must keep."""

    arch: Architecture
    group_size: int
    length_limit: Callable[[int], int]  # version at the group's start -> tokens
    with_experts: bool = False  # True: a mixture's routing is replayed

    def fault(self, group: Any, order: Order, *, oldest: int, newest: int) -> str:
        """Return the first fault of an order's group; "": it has none.

        Its tokens' policy versions must be from `oldest` to `newest`.
        """
        try:
            return next(self._faults(group, order, oldest, newest), "")
        except Exception as error:  # noqa: BLE001  foreign objects may raise anything
            return f"it cannot be checked: {type(error).__name__}: {error}"

    def _faults(
        self, group: Any, order: Order, oldest: int, newest: int
    ) -> Iterator[str]:
        """Yield faults; the caller stops at the first, so later checks may fail."""
        rollouts = group.rollouts
        yield from _faults_of_prompt(group.prompt, order.prompt)
        if type(rollouts) is not tuple or len(rollouts) != self.group_size:
            yield f"its rollouts are no tuple of batch.group_size = {self.group_size}"
        limit = self.length_limit(order.begun_version)
        for number, rollout in enumerate(rollouts):
            for fault in self._faults_of_shape(
                rollout, len(group.prompt.tokens), limit
            ):
                yield f"rollout {number}: {fault}"
        opened = any(each.turns and not each.turns[0].sampled for each in rollouts)
        if len(group.prompt.tokens) < len(order.prompt.tokens) and not opened:
            yield f"its prompt differs in tokens from prompt {order.prompt.prompt_id}"
        yield from self._faults_of_numbers(rollouts, oldest, newest)
        for number, rollout in enumerate(rollouts):
            for fault in _faults_of_verdict(rollout):
                yield f"rollout {number}: {fault}"
        last = max(int(each.policy_versions[-1]) for each in rollouts)
        finished = group.finished_version
        if type(finished) is not int or not last <= finished <= newest:
            yield f"finished_version = {finished!r} is not from {last} to {newest}"
        if type(group.detail) is not str:
            yield f"detail is a {type(group.detail).__name__} and no text"

    def _faults_of_shape(
        self, rollout: Any, prompt_length: int, limit: int
    ) -> Iterator[str]:
        if type(rollout) is not Rollout:
            yield f"it is a {type(rollout).__name__}"
        for name, dtype in TOKEN_ARRAYS.items():
            array = getattr(rollout, name)
            if type(array) is not np.ndarray or array.ndim != 1:
                yield f"{name} is no array [T]"
            if array.dtype != dtype:
                yield f"{name} is {array.dtype} and not {dtype}"
            if len(array) != len(rollout.completion_tokens):
                yield (
                    f"{name} has {len(array)} values for "
                    f"{len(rollout.completion_tokens)} tokens"
                )
        length = len(rollout.completion_tokens)
        if not 0 < length <= limit:
            yield f"{length} tokens; 1 to {limit} can be sampled"
        yield from _faults_of_turns(rollout)
        yield from self._faults_of_experts(rollout.experts, prompt_length - 1 + length)

    def _faults_of_experts(self, experts: Any, length: int) -> Iterator[str]:
        if not self.with_experts:
            if experts is not None:
                yield "it has experts, and no routing is replayed"
            return
        mixture = self.arch.experts
        if mixture is None:
            raise ValueError("routing is replayed only for a mixture")
        shape, dtype = (length, self.arch.num_layers, mixture.top_k), mixture.id_dtype
        if type(experts) is not np.ndarray:
            yield f"its experts are a {type(experts).__name__} and no array"
        if (experts.shape, experts.dtype) != (shape, dtype):
            yield (
                f"its experts are {experts.dtype}{list(experts.shape)} and not "
                f"{dtype}{list(shape)}"
            )
        if ((experts >= mixture.count) & (experts != np.iinfo(dtype).max)).any():
            yield f"an expert is not among the {mixture.count} of a layer"

    def _faults_of_numbers(
        self, rollouts: tuple[Rollout, ...], oldest: int, newest: int
    ) -> Iterator[str]:
        """Check the arrays of all rollouts laid end to end, in few passes."""
        tokens, _, logprobs, versions = (
            np.concatenate([getattr(each, name) for each in rollouts])
            for name in TOKEN_ARRAYS
        )
        vocabulary = self.arch.vocab_size
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            yield (
                f"token ids from {tokens.min()} to {tokens.max()}; the vocabulary has "
                f"0 to {vocabulary - 1}"
            )
        # `not`, so that a NaN is refused, too.
        if not (logprobs.min() > -np.inf and logprobs.max() <= _MOST_LOGPROB):
            yield (
                f"log-probabilities from {logprobs.min():.3g} to {logprobs.max():.3g}; "
                f"they must be finite and 0 at most"
            )
        if versions.min() < oldest or versions.max() > newest:
            yield (
                f"policy versions from {versions.min()} to {versions.max()}; they must "
                f"be from {oldest} to {newest}"
            )
        falls = np.diff(versions) < 0
        ends = np.cumsum([len(each.policy_versions) for each in rollouts])[:-1] - 1
        falls[ends] = False
        if falls.any():
            yield "the policy versions of a rollout decrease along its tokens"


def _faults_of_prompt(given: Any, prompt: Prompt) -> Iterator[str]:
    if type(given) is not Prompt:
        yield f"its prompt is a {type(given).__name__}"
    for name in ("prompt_id", "epoch", "task", "text", "reference"):
        own, theirs = getattr(prompt, name), getattr(given, name)
        if type(theirs) is not type(own) or not _is_same(theirs, own):
            yield f"its prompt differs in {name} from prompt {prompt.prompt_id}"
    tokens = given.tokens
    if type(tokens) is not np.ndarray or tokens.dtype != prompt.tokens.dtype:
        yield f"its prompt's tokens are no array of {prompt.tokens.dtype}"
    # The prompt may lack its end if an environment's opening comes before that.
    if not len(tokens) or not np.array_equal(tokens, prompt.tokens[: len(tokens)]):
        yield f"its prompt differs in tokens from prompt {prompt.prompt_id}"


def _is_same(given: Any, own: Any) -> bool:
    """Return whether a value is the prompt's, also if that was sent to a replica.

    A row's reference may hold a NaN, which no longer equals itself then.
    """
    return given == own or (type(own) is dict and json.dumps(given) == json.dumps(own))


def _faults_of_turns(rollout: Rollout) -> Iterator[str]:
    turns, place, sampled = rollout.turns, 0, None
    if type(turns) is not tuple:
        yield f"its turns are a {type(turns).__name__}"
    for number, turn in enumerate(turns):
        if type(turn) is not Turn or [type(each) for each in turn[:3]] != _TURN:
            yield f"turn {number} is {turn!r}"
        if turn.start != place or turn.end < place or turn.sampled is sampled:
            yield (
                f"turn {number} is from {turn.start} to {turn.end}, after a turn that "
                f"ends at {place}"
            )
        if not turn.sampled and rollout.completion_mask[turn.start : turn.end].any():
            yield f"turn {number} is an observation, and a token of it was sampled"
        reward = turn.reward
        if reward is not None and not (type(reward) is float and math.isfinite(reward)):
            yield f"turn {number} has the reward {reward!r}"
        place, sampled = turn.end, turn.sampled
    if turns and (place != len(rollout.completion_tokens) or not turns[-1].sampled):
        yield f"its turns end at {place} of {len(rollout.completion_tokens)} tokens"


def _faults_of_verdict(rollout: Rollout) -> Iterator[str]:
    for name in _FLAGS:
        if not isinstance(getattr(rollout, name), bool | np.bool_):
            yield f"{name} is {getattr(rollout, name)!r} and no bool"
    reward: Any = rollout.reward
    number = isinstance(reward, float | int | np.floating) and reward is not bool(
        reward
    )
    if not number or not math.isfinite(reward):
        yield f"reward = {reward!r} is no finite number"
    if type(rollout.status) is not str or rollout.status not in _STATUSES:
        yield f"status = {rollout.status!r} is not among {sorted(_STATUSES)}"
    parts: Any = rollout.parts
    if type(parts) is not dict or not all(
        type(name) is str
        and (value is None or (type(value) is float and math.isfinite(value)))
        for name, value in parts.items()
    ):
        yield f"parts = {parts!r} are no finite numbers by name"
    if rollout.passed and not rollout.judged:
        yield "it passed without a verdict"


def ticket_of(group: Any) -> int | None:
    """Return the ticket of an object from a replica; None if it is no group."""
    good = type(group) is Group and type(group.ticket) is int
    return group.ticket if good else None


def count_tokens(group: Group) -> int:
    """Count the generated tokens of a discarded group, which may be malformed."""
    rollouts = group.rollouts if type(group.rollouts) is tuple else ()
    return sum(map(_generated, (each for each in rollouts if type(each) is Rollout)))


def _generated(rollout: Rollout) -> int:
    with contextlib.suppress(Exception):  # foreign objects may raise anything
        if not any(_faults_of_turns(rollout)):
            return rollout.generated_tokens
    return np.size(rollout.completion_tokens)
