"""How often verifiers failed of late, and whether a run is to stop for it.

A rollout whose verifier timed out or failed is unjudged.  A few are left out without
harm; many say that the verifier is broken, and what breaks it chooses what is left.
"""

import collections
from collections.abc import Iterable, Sequence

from scalerl_jax.rewards.verdict import UNJUDGED
from scalerl_jax.types import Group

_BATCHES = 10  # that the share is taken of


class UnjudgedWatch:
    """Counts unjudged rollouts; `reason` says why the run cannot go on."""

    def __init__(self, *, max_share: float, num_prompts: int, group_size: int) -> None:
        """Before the first group; batches are of so many prompts and rollouts each."""
        self._max_share = max_share
        self._recent: collections.deque[tuple[int, str]] = collections.deque(
            maxlen=_BATCHES * num_prompts
        )
        self._most = max_share * _BATCHES * num_prompts * group_size  # rollouts
        self.reason: str | None = None  # None: it may go on

    def add(self, groups: Sequence[Group]) -> None:
        """Count groups of the training as they are taken."""
        for group in groups:
            failed = _count(rollout.status for rollout in group.rollouts)
            self._recent.append((failed, group.detail))
        failed = sum(count for count, _ in self._recent)
        if failed > self._most:
            self._stop(
                f"verifiers failed on {failed} rollouts of the last {_BATCHES} batches",
                (detail for count, detail in self._recent if count),
            )

    def evaluated(
        self, share: float, details: Iterable[str], *, no_figure: bool
    ) -> None:
        """The share of the samples of an evaluation that are unjudged, and why.

        `no_figure`: there is no pass rate, for there is no verdict.
        """
        if share > self._max_share or no_figure:
            self._stop(
                f"verifiers failed on {share:.0%} of the samples of an evaluation",
                details,
            )

    def _stop(self, what: str, details: Iterable[str]) -> None:
        often = collections.Counter(filter(None, details)).most_common(1)
        why = f", most often with: {often[0][0]}" if often else ""
        self.reason = (
            f"{what}, more than reward.max_unjudged_share = {self._max_share}{why}. "
            f"Mend that, or raise the limit, and start again with the same --workdir"
        )


def _count(statuses: Iterable[str]) -> int:
    return sum(status in UNJUDGED for status in statuses)
