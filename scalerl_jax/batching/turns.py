"""Rewards of turns, for `reward.per_turn`: what they add to advantages, by token."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from scalerl_jax.algo.advantages import group_advantages, turn_advantages
from scalerl_jax.types import Rollout


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnRewards:
    """The rewards of a batch's turns, each beside the same turn of its group."""

    centered: Float[np.ndarray, "M R S"]  # on the tokens of the turn; 0 elsewhere
    group_size: int

    def scale(
        self,
        rewards: Float[np.ndarray, " B"],
        judged: Bool[np.ndarray, " B"],
        kept: Bool[np.ndarray, " B"],
        advantages: Float[np.ndarray, " B"],
    ) -> Float[np.ndarray, " B"]:
        """Return what to multiply turns by, so that they are scaled as episodes are.

            largest |A| of the group / largest |reward - mean of the group|

        The mean is over the judged rollouts, as that of the episodes; both maxima are
        over the kept ones, since the others have no A.  A group without variance has
        no scale, and its turns add 0.
        """
        arrays = map(jnp.asarray, (rewards, judged))
        centered = np.asarray(group_advantages(*arrays, group_size=self.group_size))
        centered = np.where(kept, centered, 0.0)
        plain, scaled = (
            np.abs(each).reshape(-1, self.group_size).max(axis=1)
            for each in (centered, advantages)
        )
        scale = np.divide(scaled, plain, out=np.zeros_like(plain), where=plain > 0)
        return np.repeat(scale, self.group_size)


def turn_rewards(
    rollouts: Sequence[Rollout],
    judged: np.ndarray,
    places: np.ndarray,
    *,
    group_size: int,
) -> TurnRewards:
    """Return the rewards of the turns of B rollouts, less the means of their groups.

    Args:
        rollouts: B, group by group.
        judged: bool [B].
        places: int [M, R, S], the rollout of each prediction; -1 where there is none.
        group_size: G.
    """
    sampled = [[turn for turn in each.turns if turn.sampled] for each in rollouts]
    shape = len(rollouts), max(1, *map(len, sampled))
    given, taken = np.zeros(shape, np.float32), np.zeros(shape, bool)
    for row, turns in enumerate(sampled):
        given[row, : len(turns)] = [turn.reward or 0.0 for turn in turns]
        taken[row, : len(turns)] = True
    arrays = map(jnp.asarray, (given, taken, judged))
    centered = np.asarray(turn_advantages(*arrays, group_size=group_size))
    on_tokens = np.zeros(places.shape, np.float32)
    flat = places.ravel()
    # Predictions of a rollout are in the order of its tokens.
    order = np.argsort(flat, kind="stable")
    order = order[flat[order] >= 0]
    of_tokens = [np.zeros(0, np.float32)]
    for row in np.unique(flat[order]).tolist():
        tokens = np.zeros(len(rollouts[row].completion_tokens), np.float32)
        for place, turn in enumerate(sampled[row]):
            tokens[turn.start : turn.end] = centered[row, place]
        of_tokens.append(tokens)
    on_tokens.ravel()[order] = np.concatenate(of_tokens)
    return TurnRewards(centered=on_tokens, group_size=group_size)
