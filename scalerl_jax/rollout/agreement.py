"""Do the sampler and the learner agree, at equal version, before a run is paid for?

Most broken RL runs are a sampler that is not the policy being trained: other pads, an
ignored temperature, a head that was not loaded.  It shows in the log-probabilities,
those at the sampler's temperature and before its filters: the learner has no filters.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from scalerl_jax.learner.step import Forward
from scalerl_jax.rollout.batching import TrainSequence, pack
from scalerl_jax.sampler.completing import complete, never
from scalerl_jax.sampler.engine import Engine
from scalerl_jax.sampler.requests import Completion, Samples
from scalerl_jax.sampler.sampling import Sampling
from scalerl_jax.types import Prompt, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """|sampler - learner| over sampled tokens of one version, in nats."""

    mean_abs: float
    max_abs: float
    kl: float  # k3 estimator of KL(sampler || learner), of tokens that filters leave
    tokens: int

    def metrics(self) -> dict[str, float]:
        """By metric name."""
        return {f"mismatch/{name}": value for name, value in vars(self).items()}


class AgreementCheck:
    """Completes a few prompts and compares log-probabilities token by token."""

    def __init__(
        self,
        engine: Engine,
        forward: Forward,
        *,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        make_samples: Callable[[Prompt], Samples],
        row_tokens: int,
        rows_per_microbatch: int,
        max_mismatch_nats: float,
    ) -> None:
        """A check of `engine` against `forward`, on always the same prompts.

        `max_mismatch_nats` is the largest mean difference that `require` accepts.
        """
        self._engine = engine
        self._logprobs = jax.jit(forward.logprobs)
        self._prompts = prompts
        self._sampling = sampling
        self._make_samples = make_samples
        self._row_tokens = row_tokens
        self._rows_per_microbatch = rows_per_microbatch
        self._max_mismatch_nats = max_mismatch_nats

    def require(self, learner_params: PyTree, sampler_params: PyTree) -> Agreement:
        """The same as calling it, but refuses a sampler that is not the policy.

        Raises:
            RuntimeError: the mean difference passes the limit.
        """
        agreement = self(learner_params, sampler_params)
        limit = self._max_mismatch_nats
        # Written so that a NaN is refused too.
        if not agreement.mean_abs <= limit:
            raise RuntimeError(
                f"the sampler's and the learner's log-probabilities differ by "
                f"{agreement.mean_abs:.3g} nats on average over {agreement.tokens} "
                f"tokens of one version; train.max_mismatch_nats = {limit}. Check the "
                f"dtypes of model.* and the checkpoint before raising the limit"
            )
        return agreement

    def __call__(
        self,
        learner_params: PyTree,
        sampler_params: PyTree,
        *,
        stopped: Callable[[], bool] = never,
    ) -> Agreement:
        """The difference at equal version; both trees are that version's.

        Raises:
            Abandoned: `stopped` said so.
        """
        completions = complete(
            self._engine,
            sampler_params,
            self._prompts,
            make_samples=self._make_samples,
            sampling=self._sampling,
            version=0,
            stopped=stopped,
        )
        batch = pack(
            [_sequence(self._prompts[each.request_id], each) for each in completions],
            row_tokens=self._row_tokens,
            rows_per_microbatch=self._rows_per_microbatch,
        )
        parts = []
        for index in range(len(batch.tokens)):
            logprobs, _ = self._logprobs(
                learner_params,
                batch.tokens[index],
                positions=batch.positions[index],
                segment_ids=batch.segment_ids[index],
                targets=batch.targets[index],
            )
            difference = np.asarray(logprobs) - batch.behavior_logprobs[index]
            parts.append(difference[np.asarray(batch.mask[index])])
        difference = np.concatenate(parts).astype(np.float64)
        return Agreement(
            mean_abs=float(np.abs(difference).mean()),
            max_abs=float(np.abs(difference).max()),
            kl=float((np.expm1(difference) - difference).mean()),
            tokens=len(difference),
        )


def _sequence(prompt: Prompt, completion: Completion) -> TrainSequence:
    length = len(completion.tokens)
    return TrainSequence(
        tokens=np.concatenate([prompt.tokens, completion.tokens]),
        prompt_length=len(prompt.tokens),
        weights=completion.mask.astype(np.float32),
        mask=completion.mask,
        behavior_logprobs=completion.full_logprobs,
        staleness=np.zeros(length, np.int32),
        advantage=0.0,
    )
