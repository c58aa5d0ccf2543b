"""The check, at the start of a run, that sampler and learner agree at equal version.

Most broken RL runs have a sampler that is not the policy being trained: other padding,
an ignored temperature, a head that was not loaded.  Log-probabilities are compared at
the sampler's temperature, before its filters, since the learner has no filters.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from scalerl_jax.batching.assembly import Pack
from scalerl_jax.batching.packing import TrainSequence
from scalerl_jax.contract import State
from scalerl_jax.sampler.requests import Completion
from scalerl_jax.types import PackedBatch, Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Differences |sampler - learner| of log-probabilities at one version, in nats."""

    mean_abs: float
    max_abs: float
    kl: float  # k3 estimator of KL(sampler || learner), on tokens that filters keep
    tokens: int
    # The differences without routing replay; None unless replayed, by `require`.
    unreplayed: "Mismatch | None" = None

    def metrics(self) -> dict[str, float]:
        """Return the values by metric name."""
        names = ("mean_abs", "max_abs", "kl", "tokens")
        return {f"mismatch/{name}": getattr(self, name) for name in names}

    def __str__(self) -> str:
        """Return a sentence about the difference of sampler and learner."""
        said = (
            f"sampler and learner differ by {self.mean_abs:.1e} nats on average, "
            f"{self.max_abs:.1e} at most, over {self.tokens} tokens"
        )
        if self.unreplayed is None:
            return said
        free = self.unreplayed
        return (
            f"{said}; without routing replay by {free.mean_abs:.1e} on average, "
            f"{free.max_abs:.1e} at most (KL {free.kl:.1e}, with it {self.kl:.1e})"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MismatchCheck:
    """A comparison of sampled tokens' log-probabilities with the learner's."""

    score: Callable[[State, PackedBatch], Float[np.ndarray, "M R S"]]
    pack: Pack  # as for a train step: a prompt may be computed once for its completions
    max_mismatch_nats: float  # the largest mean difference that `require` accepts

    def require(
        self, state: State, sampled: Sequence[tuple[Prompt, Completion]]
    ) -> Mismatch:
        """Return the difference; refuse a sampler that is not the policy.

        If completions have experts, these are replayed, and the difference without
        replay is also measured.

        Raises:
            RuntimeError: the mean difference is above the limit.
        """
        mismatch = self(state, sampled)
        limit = self.max_mismatch_nats
        # `not`, so that a NaN is refused, too.
        if not mismatch.mean_abs <= limit:
            raise RuntimeError(
                f"the sampler's and the learner's log-probabilities differ by "
                f"{mismatch.mean_abs:.3g} nats on average over {mismatch.tokens} "
                f"tokens of one version; train.max_mismatch_nats = {limit}. Check the "
                f"dtypes of model.* and sampler.*, and the checkpoint, before "
                f"raising the limit"
            )
        if all(completion.experts is None for _, completion in sampled):
            return mismatch
        free = [
            (prompt, dataclasses.replace(completion, experts=None))
            for prompt, completion in sampled
        ]
        return dataclasses.replace(mismatch, unreplayed=self(state, free))

    def __call__(
        self, state: State, sampled: Sequence[tuple[Prompt, Completion]]
    ) -> Mismatch:
        """Return the difference; `sampled` was sampled with the params of `state`."""
        batch = self.pack([as_sequence(*each) for each in sampled]).batch
        mask = np.asarray(batch.mask)
        difference = self.score(state, batch)[mask] - batch.behavior_logprobs[mask]
        difference = difference.astype(np.float64)
        return Mismatch(
            mean_abs=float(np.abs(difference).mean()),
            max_abs=float(np.abs(difference).max()),
            kl=float((np.expm1(difference) - difference).mean()),
            tokens=len(difference),
        )


def as_sequence(prompt: Prompt, completion: Completion) -> TrainSequence:
    """Return a completion as a train sequence, for scoring."""
    length = len(completion.tokens)
    return TrainSequence(
        tokens=np.concatenate([prompt.tokens, completion.tokens]),
        prompt_length=len(prompt.tokens),
        weights=completion.mask.astype(np.float32),
        mask=completion.mask,
        behavior_logprobs=completion.full_logprobs,
        staleness=np.zeros(length, np.int32),
        experts=completion.experts,
    )
