"""The protocol of a sampler: all that its callers use.

    sampler.load(params, version)      params for the next steps
    sampler.submit(request)            queue; it starts when slots are free
    completions = sampler.step()       some tokens for every request that has slots
    sampler.resume(request, turn, appended)   continue a completion after other tokens
    sampler.cancel(request_id)         drop the request
    sampler.close()                    drop all, and hold no part of the cache

`scheduler.Scheduler` is the fast sampler, `reference.ReferenceSampler` a slow one for
reading and tests.  For equal params and requests they draw equal tokens.  The fast one
uses an engine with JetStream's verbs.  `Driver` is the loop around either, in training,
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
    """A sampler: completes requests, with params that may change between two steps.

    Not thread-safe: it has one owner at a time.
    """

    @property
    def free_slots(self) -> int:
        """Free slots minus waiting samples; negative if more samples wait."""
        ...

    @property
    def busy(self) -> bool:
        """Return whether any sample has a slot or waits for one."""
        ...

    @property
    def stats(self) -> SamplerStats:
        """Counts so far."""
        ...

    def load(self, params: PyTree, version: int) -> None:
        """Use the params of a policy version from the next step on.

        Raises:
            ValueError: the params are not of the sampler's model, or the version is
                older than the last one; then nothing has changed.
        """
        ...

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: this sampler cannot serve it; see `Request.check`.
        """
        ...

    def resume(
        self, request: Request, turn: Completion, appended: Int[np.ndarray, " n"]
    ) -> None:
        """Queue one sample again, to continue after tokens that it did not draw.

        `turn` is the sample's completion so far.  Between a turn and its resumption the
        sample has neither a slot nor pages.  The next completion of the sample has all
        tokens: those of `turn`, the appended ones with a mask of False and the version
        of the token before them, and the newly sampled ones.  The index in the
        completion continues, so that no draw is repeated.  Limits, distribution and
        stop strings are those of `request`, and count from the start of the completion;
        its keys must be those with which the sample started.

        Raises:
            ValueError: this sampler cannot serve it, or no token is left to sample.
        """
        ...

    def cancel(self, request_id: int) -> int:
        """Drop a request; return the number of its tokens that are in no completion.

        Samples between a turn and its resumption are not in the sampler, and lose none.
        """
        ...

    def step(self) -> list[Completion]:
        """Sample for a while with the loaded params; return what has finished."""
        ...

    def close(self) -> None:
        """Drop all requests; nothing may be called afterwards.

        Samplers that share a cache with this one get its part.
        """
        ...


@dataclasses.dataclass
class Driver:
    """The loop around a sampler: submits requests and makes steps, in one thread.

    Training, evaluation and serving differ only in the source of requests and the
    receiver of completions.
    """

    sampler: Sampler

    def fill(self, next_request: Callable[[], Request | None]) -> None:
        """Submit requests as long as a slot is free and there is another request.

        `next_request` is called only when a sample of its request can start at once.
        """
        while self.sampler.free_slots > 0 and (request := next_request()) is not None:
            self.sampler.submit(request)

    def step(self) -> list[Completion]:
        """Make a step if there is anything to sample; return what it has finished."""
        return self.sampler.step() if self.sampler.busy else []


def check_version(version: int, *, last: int | None) -> None:
    """Refuse an update to an older version.

    Raises:
        ValueError: the version is older than the last one.
    """
    if last is not None and version < last:
        raise ValueError(
            f"params of version {version} after those of version {last}: "
            f"an update must not go back"
        )
