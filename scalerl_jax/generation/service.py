"""The loop that drives a scheduler, for training, evaluation and serving alike.

Its simplest source is a list of prompts, completed at one version: that of evaluation
and of the agreement check.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.requests import Completion, Listener, Request, Samples
from scalerl_jax.sampler.sampling import Sampling
from scalerl_jax.sampler.scheduler import Scheduler
from scalerl_jax.types import Prompt, PyTree


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


class Abandoned(Exception):  # noqa: N818  an end, not an error
    """Whoever wanted the completions has said to stop."""


def never() -> bool:
    """Let everything be completed."""
    return False


class _Listed:
    """The source of a list's requests, each begun when there is a slot for it."""

    def __init__(
        self,
        requests: Iterator[Request],
        prompts: Sequence[Prompt],
        stopped: Callable[[], bool],
    ) -> None:
        self._requests, self._prompts, self._stopped = requests, prompts, stopped
        self._completions: list[Completion] = []

    def fill(self, scheduler: Scheduler, version: int) -> bool:
        while scheduler.free_slots > 0 and (request := next(self._requests, None)):
            scheduler.submit(request)
        if scheduler.busy and self._stopped():
            raise Abandoned
        return scheduler.busy

    def sampling(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def ended(self, completions: list[Completion], version: int) -> None:
        for each in completions:
            if each.failure:
                raise FloatingPointError(
                    f"sample {each.sample} of prompt "
                    f"{self._prompts[each.request_id].text!r} failed: {each.failure}"
                )
        self._completions = completions

    def rest(self, *, sampled: bool) -> None:
        assert sampled, "it is over when nothing is running"

    def take(self) -> list[Completion]:
        """Return what the last step has ended."""
        return self._completions


def completing(
    engine: Engine,
    params: PyTree,
    prompts: Sequence[Prompt],
    *,
    make_samples: Callable[[Prompt], Samples],
    sampling: Sampling,
    version: int,
    listener: Listener | None = None,
    stopped: Callable[[], bool] = never,
) -> Iterator[list[Completion]]:
    """Complete every sample of every prompt; yield what each step has ended.

    They have slots of their own and one version.  `request_id` is the place of the
    prompt, which is read when there is a slot for it.

    Raises:
        Abandoned: `stopped`, asked before each step, said so.
        FloatingPointError: the logits of a sample were not finite.
    """
    requests = (
        Request(
            request_id=place,
            tokens=prompt.tokens,
            samples=make_samples(prompt),
            sampling=sampling,
            listener=listener,
        )
        for place, prompt in enumerate(prompts)
    )
    source = _Listed(requests, prompts, stopped)
    for _ in turns(Scheduler(engine), source, lambda: (params, version)):
        yield source.take()


Probed = tuple[Prompt, Completion]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """A few prompts that are completed again and again, to compare the learner with."""

    engine: Engine
    prompts: Sequence[Prompt]
    sampling: Sampling
    make_samples: Callable[[Prompt], Samples]

    def __call__(
        self, params: PyTree, *, stopped: Callable[[], bool] = never
    ) -> list[Probed]:
        """Return every completion with its prompt, in the order of their ends.

        Raises:
            Abandoned: `stopped` said so.
        """
        steps = completing(
            self.engine,
            params,
            self.prompts,
            make_samples=self.make_samples,
            sampling=self.sampling,
            version=0,
            stopped=stopped,
        )
        return [
            (self.prompts[each.request_id], each) for ended in steps for each in ended
        ]
