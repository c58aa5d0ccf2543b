"""The loop that drives a scheduler, for training, evaluation and serving alike."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from scalerl_jax.sampler.requests import Completion
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.types import PyTree


class Source(Protocol):
    """A source of requests, which also takes their completions."""

    def fill(self, scheduler: Scheduler, version: int) -> bool:
        """Submit what may start now; False: all is done, and nothing more will come."""
        ...

    def sampling(self) -> contextlib.AbstractContextManager[None]:
        """Return what surrounds each step of the scheduler."""
        ...

    def ended(self, completions: list[Completion], version: int) -> None:
        """Take the completions that a step at this version has ended."""
        ...

    def rest(self, *, sampled: bool) -> None:
        """Do what is due between two steps; wait, if nothing was `sampled`."""
        ...


def turns(
    scheduler: Scheduler, source: Source, newest: Callable[[], tuple[PyTree, int]]
) -> Iterator[None]:
    """Fill the scheduler, step it, hand out what has ended, until the source is done.

    `newest` gives the params and their version for the next step.
    """
    while True:
        params, version = newest()
        if not source.fill(scheduler, version):
            return
        sampled = scheduler.busy
        if sampled:
            with source.sampling():
                completions = scheduler.step(params, version=version)
            source.ended(completions, version)
        source.rest(sampled=sampled)
        yield
