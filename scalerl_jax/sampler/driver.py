"""The loop around a sampler that training, evaluation and serving share.

They differ in where requests come from and who gets the completions, not in between.
"""

import dataclasses
from collections.abc import Callable

from scalerl_jax.sampler.protocol import Sampler
from scalerl_jax.sampler.requests import Completion, Request


@dataclasses.dataclass
class Driver:
    """Feeds one sampler and steps it, in one thread at a time."""

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
