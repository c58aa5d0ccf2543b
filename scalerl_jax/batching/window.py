"""Windows: the groups of several optimizer steps, and the order of these.

A window is a set of groups taken together and cut into batches of N.  Its optimizer
steps go epoch by epoch, as in PPO: each epoch covers all batches of the window, the
first epoch in ticket order, a later one in an order drawn from (seed, version at the
start of the window, epoch).
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from scalerl_jax.batching.assembly import Batch
from scalerl_jax.types import Group, PackedBatch, Scores

_ORDER = 4  # tag of this random draw; `data` uses other numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One batch in one epoch: an optimizer step to make."""

    batch: Batch
    epoch: int
    last: bool  # of the window


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """The batches of a window, packed at policy version `version`."""

    batches: Sequence[Batch]
    version: int

    def packed(self) -> list[PackedBatch]:
        """Return the packed arrays of the batches that have a gradient."""
        return [each.packed for each in self.batches if each.packed is not None]

    def completed(
        self, scores: Sequence[Scores], complete: Callable[[Batch, Scores], Batch]
    ) -> "Window":
        """Return the window with scores and advantages, given scores of `packed()`.

        `complete` is an `Assembler`'s.
        """
        of_packed = iter(scores)
        batches = [
            each if each.packed is None else complete(each, next(of_packed))
            for each in self.batches
        ]
        return dataclasses.replace(self, batches=batches)

    def passes(self, *, epochs: int, seed: int) -> list[Pass]:
        """Return the steps in order; a batch without a gradient comes once only."""
        turns = [(0, batch) for batch in self.batches]
        useful = [batch for batch in self.batches if batch.packed is not None]
        for epoch in range(1, epochs):
            random = np.random.Generator(
                np.random.PCG64([seed, _ORDER, self.version, epoch])
            )
            turns += [(epoch, useful[at]) for at in random.permutation(len(useful))]
        return [
            Pass(batch=batch, epoch=epoch, last=number == len(turns))
            for number, (epoch, batch) in enumerate(turns, start=1)
        ]

    def at(self, version: int, batch: Batch) -> Batch:
        """Return a batch with its staleness counted for the step from `version`."""
        packed, age = batch.packed, version - self.version
        if packed is None or not age:
            return batch
        aged = dataclasses.replace(packed, staleness=packed.staleness + age)
        return dataclasses.replace(batch, packed=aged)


def open_window(
    groups: Sequence[Group],
    *,
    num_prompts: int,
    num_batches: int,
    version: int,
    assemble: Callable[..., Batch],
) -> Window:
    """Return the window of `groups`, which are in ticket order, packed.

    `assemble` is an `Assembler` or has its signature.  If there are more groups than
    `num_batches` of `num_prompts`, the surplus are zero-variance groups that refills
    have replaced: the last such groups are taken out and noted as `refilled` of the
    batches, for which they were generated.
    """
    places = num_batches * num_prompts
    by_use = sorted(groups, key=lambda group: not group.has_reward_variance)
    kept, over = by_use[:places], by_use[places:]
    kept = sorted(kept, key=lambda group: group.ticket)
    batches = []
    for number in range(num_batches):
        chosen = kept[number * num_prompts : (number + 1) * num_prompts]
        batch = assemble(chosen, learner_version=version)
        batches.append(dataclasses.replace(batch, refilled=over[number::num_batches]))
    return Window(batches=batches, version=version)
