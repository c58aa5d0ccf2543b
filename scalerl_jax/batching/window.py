"""A window: groups that were taken together, cut into batches, and the steps on them.

The steps go epoch by epoch, as PPO's do: each epoch goes over all batches of the
window.  The first in the order of their tickets, a later one in an order drawn from
(seed, version at the start of the window, epoch).
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from scalerl_jax.batching.assembly import Assembled
from scalerl_jax.types import Group, PackedBatch

_ORDER = 4  # purpose of the draw, beside those of `data`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """N groups to train on, as they were taken and as they are laid out."""

    groups: Sequence[Group]
    refilled: Sequence[Group]  # generated for it too, and without reward variance
    assembled: Assembled

    @property
    def wasted_tokens(self) -> int:
        """Completion tokens that lead to no gradient."""
        return self.assembled.wasted_tokens + sum(
            len(rollout.completion_tokens)
            for group in self.refilled
            for rollout in group.rollouts
        )

    @property
    def num_useful(self) -> int:
        """Groups of it with reward variance."""
        return sum(group.has_reward_variance for group in self.groups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One batch in one epoch: a step to be."""

    batch: Batch
    epoch: int
    last: bool  # of the window


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """The batches of a window, assembled at `version`."""

    batches: Sequence[Batch]
    version: int

    def packed(self) -> list[PackedBatch]:
        """Return the batches that have a gradient, as the step reads them."""
        packed = (batch.assembled.batch for batch in self.batches)
        return [each for each in packed if each is not None]

    def annotated(self, packed: Sequence[PackedBatch]) -> "Window":
        """The same window with other arrays in place of `packed()`."""
        rest = iter(packed)
        return dataclasses.replace(
            self,
            batches=[
                dataclasses.replace(
                    batch,
                    assembled=dataclasses.replace(batch.assembled, batch=next(rest)),
                )
                if batch.assembled.batch is not None
                else batch
                for batch in self.batches
            ],
        )

    def passes(self, *, epochs: int, seed: int) -> list[Pass]:
        """Every step to be, in order; a batch without a gradient comes once."""
        turns = [(0, batch) for batch in self.batches]
        useful = [batch for batch in self.batches if batch.assembled.batch is not None]
        for epoch in range(1, epochs):
            random = np.random.Generator(
                np.random.PCG64([seed, _ORDER, self.version, epoch])
            )
            turns += [(epoch, useful[at]) for at in random.permutation(len(useful))]
        return [
            Pass(batch=batch, epoch=epoch, last=number == len(turns))
            for number, (epoch, batch) in enumerate(turns, start=1)
        ]

    def at(self, version: int, batch: Batch) -> Assembled:
        """A batch as the step from `version` sees it: its tokens have aged."""
        packed, age = batch.assembled.batch, version - self.version
        if packed is None or not age:
            return batch.assembled
        aged = dataclasses.replace(packed, staleness=packed.staleness + age)
        return dataclasses.replace(batch.assembled, batch=aged)


def open_window(
    groups: Sequence[Group],
    *,
    num_prompts: int,
    num_batches: int,
    version: int,
    assemble: Callable[..., Assembled],
) -> Window:
    """The window of `groups`, which are in the order of their tickets.

    `assemble` is called as an `Assembler` is.
    Where there are more than the batches hold, those without reward variance are too
    many: the last of them are left over, and shared out among the batches, for whom
    they were generated.
    """
    places = num_batches * num_prompts
    by_use = sorted(groups, key=lambda group: not group.has_reward_variance)
    kept, over = by_use[:places], by_use[places:]
    kept = sorted(kept, key=lambda group: group.ticket)
    batches = []
    for number in range(num_batches):
        chosen = kept[number * num_prompts : (number + 1) * num_prompts]
        batches.append(
            Batch(
                groups=chosen,
                refilled=over[number::num_batches],
                assembled=assemble(chosen, learner_version=version),
            )
        )
    return Window(batches=batches, version=version)
