"""Model FLOPs of the learner, by the passes that the objective asks for.

A backward pass costs two forward passes.  What is computed twice to save memory is
counted once; the optimizer, the loss and what explains a skipped step are left out.
"""

import dataclasses

from scalerl_jax.model.architecture import Architecture


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerFlops:
    """FLOPs of a batch, by its tokens and what each of them attends to on average."""

    arch: Architecture
    scores: int = 0  # log-probabilities before a window's steps: anchor, reference
    critic_passes: int = 0  # over a batch, in however many steps

    def annotation(self, tokens: int, context: float) -> float:
        """FLOPs before the first step: a pass per score, and one for the values."""
        values = self._critic(context) if self.critic_passes else 0.0
        return tokens * (self.scores * self.arch.flops_per_token(context) + values)

    def step(self, tokens: int, context: float) -> float:
        """FLOPs of a step of the policy, and of the critic's on the same batch."""
        critic = self.critic_passes * self._critic(context)
        return 3 * tokens * (self.arch.flops_per_token(context) + critic)

    def _critic(self, context: float) -> float:
        """FLOPs of a token's value: the trunk, and a head of one output."""
        head = 2 * self.arch.hidden_size
        return self.arch.flops_per_token(context, head=False) + head
