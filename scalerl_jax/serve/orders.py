"""What a client orders, once it is checked, and how much one may order."""

import dataclasses

import numpy as np

from scalerl_jax.sampler.sampling import Sampling

MAX_LOGPROBS = (
    5  # likeliest tokens beside the drawn one; OpenAI's limit for completions
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may ask for."""

    max_prompt_tokens: int
    max_prompt_chars: int  # before they are made into tokens
    max_completion_tokens: int
    max_samples: int  # prompts times n
    max_body_bytes: int
    vocab_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """A request for completions that can be met."""

    prompts: tuple[np.ndarray, ...]  # int32 [P] each
    sampling: Sampling
    max_tokens: int
    num_samples: int  # of each prompt
    seed: int | None
    stop: tuple[str, ...]
    logprobs: int | None  # likeliest tokens beside the drawn one; None: no logprobs
    stream: bool
    include_usage: bool

    @property
    def num_choices(self) -> int:
        """Completions of all prompts."""
        return len(self.prompts) * self.num_samples
