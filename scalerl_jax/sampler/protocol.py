"""The protocol of a sampler: everything that its callers need, and no more.

    sampler.load(params, version)      used from the next step on
    sampler.submit(request)            in line; it begins when slots are free
    completions = sampler.step()       some tokens for every request that has slots
    sampler.cancel(request_id)         nothing more comes of it

`scheduler.Scheduler` is the fast sampler, `reference.ReferenceSampler` the slow one to
read.  For equal params and requests they draw equal tokens.  Below the fast one an
engine speaks JetStream's verbs.
"""

from typing import Protocol, runtime_checkable

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

    def cancel(self, request_id: int) -> int:
        """Drop a request; return how many of its tokens are in no completion."""
        ...

    def step(self) -> list[Completion]:
        """Sample for a while with the loaded params; return what has finished."""
        ...


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
