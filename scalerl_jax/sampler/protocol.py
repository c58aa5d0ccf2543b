"""The protocol of a sampler: everything that its callers need, and no more.

    sampler.load(params, version)      used from the next step on
    sampler.submit(request)            in line; it begins when slots are free
    completions = sampler.step()       some tokens for every request that has slots
    sampler.resume(request, turn, appended)   a completion goes on behind other tokens
    sampler.cancel(request_id)         nothing more comes of it

`scheduler.Scheduler` is the fast sampler, `reference.ReferenceSampler` the slow one to
read.  For equal params and requests they draw equal tokens.  Below the fast one an
engine speaks JetStream's verbs.  `Driver` is the loop around either, in training,
evaluation and serving.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from scalerl_jax.sampler.requests import Completion, Request, SamplerStats
from scalerl_jax.types import PyTree


@runtime_checkable
class Sampler(Protocol):
    """Completes requests, with params that may change between two steps.

    Not thread-safe: it has one owner at a time.
    """

    @property
    def free_slots(self) -> int:
        """Slots that no sample has or will take; negative: so many samples wait."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any sample has a slot or waits for one."""
        ...

    @property
    def stats(self) -> SamplerStats:
        """Counts so far."""
        ...

    def load(self, params: PyTree, version: int) -> None:
        """Take the params of a policy version for the next step and those after it.

        Raises:
            ValueError: the params are not of the sampler's model, or the version is
                older than the last one; nothing has changed then.
        """
        ...

    def submit(self, request: Request) -> None:
        """Put a request in line.

        Raises:
            ValueError: this sampler cannot serve it; see `Request.check`.
        """
        ...

    def resume(
        self, request: Request, turn: Completion, appended: Int[np.ndarray, " n"]
    ) -> None:
        """Put one sample in line again, to go on behind tokens that it did not draw.

        `turn` is the sample's completion so far.  Between a turn and its resumption the
        sampler holds nothing of it, neither a slot nor pages.  The next completion of
        the sample has all tokens: those of `turn`, the appended ones with a mask of
        False and the version of the token before them, and those that are sampled now.
        The place in the completion goes on, and so no draw comes twice.  Limits,
        distribution and stop strings are those of `request`, and count from the
        beginning of the completion; its keys must be those that the sample began with.

        Raises:
            ValueError: this sampler cannot serve it, or no token is left to sample.
        """
        ...

    def cancel(self, request_id: int) -> int:
        """Drop a request; return how many of its tokens are in no completion.

        Samples that wait to be resumed are not here any more, and lose nothing.
        """
        ...

    def step(self) -> list[Completion]:
        """Sample for a while with the loaded params; return what has finished."""
        ...


@dataclasses.dataclass
class Driver:
    """Feeds one sampler and steps it, in one thread at a time.

    Training, evaluation and serving differ in where requests come from and who gets the
    completions, not in between.
    """

    sampler: Sampler

    def fill(self, next_request: Callable[[], Request | None]) -> None:
        """Submit requests as long as a slot is free and there is another request.

        A request is made when a sample of it can begin at once, and not before.
        """
        while self.sampler.free_slots > 0 and (request := next_request()) is not None:
            self.sampler.submit(request)

    def step(self) -> list[Completion]:
        """Make a step if there is anything to sample; return what it has finished."""
        return self.sampler.step() if self.sampler.busy else []


def check_version(version: int, *, last: int | None) -> None:
    """Refuse an update that goes back.

    Raises:
        ValueError: the version is older than the last one.
    """
    if last is not None and version < last:
        raise ValueError(
            f"params of version {version} after those of version {last}: "
            f"an update must not go back"
        )
