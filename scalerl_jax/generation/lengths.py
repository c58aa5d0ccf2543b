"""The length budget: how long completions may get, by optimizer step."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from scalerl_jax.sampler.requests import Samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthBudget:
    """Stages of the completion limit, up to the one that the sampler was built for."""

    stages: Sequence[tuple[int, int]]  # (first optimizer step, tokens), growing
    max_completion_tokens: int

    def limit(self, step: int) -> int:
        """Tokens of a completion begun after `step` optimizer steps.

        That of the last stage with  first step <= step;  without stages always the
        sampler's.
        """
        begun = [tokens for first, tokens in self.stages if first <= step]
        return begun[-1] if begun else self.max_completion_tokens

    def thinking(self, tokens: int, *, limit: int) -> int:
        """Return where an interruption at `tokens` comes under a smaller limit.

            floor(tokens * limit / max_completion_tokens)

        so that thinking and answer keep their shares.
        """
        return tokens * limit // self.max_completion_tokens

    def cut(self, samples: Samples, *, step: int) -> Samples:
        """The samples under the limit of a step; no program is compiled for it."""
        limit = self.limit(step)
        if limit == self.max_completion_tokens:
            return samples
        thinking = [
            self.thinking(int(each), limit=limit) for each in samples.thinking_limits
        ]
        return dataclasses.replace(
            samples,
            thinking_limits=np.array(thinking, np.int32),
            max_tokens=np.full(len(thinking), limit, np.int32),
        )
