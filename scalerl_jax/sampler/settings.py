"""What an engine is made for: shapes, pages, and what its programs depend on."""

import dataclasses
from typing import Any

from scalerl_jax.model.architecture import Architecture
from scalerl_jax.sampler.marking import Marker


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings that the compiled programs of an engine depend on."""

    arch: Architecture
    slots: int
    max_prompt_tokens: int
    max_completion_tokens: int
    tokens_per_call: int
    dtype: Any
    eos_ids: tuple[int, ...]
    float32_head: bool = True
    phrase: tuple[int, ...] = ()  # forced at the thinking limit; empty: never
    end_of_thinking: Marker | None = None  # once spelled, nothing is forced
    page_size: int = 32  # tokens
    cache_tokens: int = 0  # that all pages hold; 0: every slot at its full length
    prefill_tokens: int = 256  # of the largest chunk
    attention: str = "auto"  # see `kernels.ATTENTION`
    top_logprobs: int = 0  # likeliest tokens reported beside the drawn one
    report_experts: bool = False  # of every token and layer; of a mixture only

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of one sequence, prompt and completion."""
        return self.max_prompt_tokens + self.max_completion_tokens

    def chunk_of(self, layer: int) -> int | None:
        """Tokens of the chunks that a layer looks into; None: it sees all there are."""
        local = self.arch.local
        if local is None or not local.with_positions[layer]:
            return None
        return local.chunk if self.max_tokens > local.chunk else None

    @property
    def near(self) -> bool:
        """Return whether a layer sees less than all tokens of the longest sequence."""
        return any(self.chunk_of(layer) for layer in range(self.arch.num_layers))

    @property
    def pages_per_slot(self) -> int:
        """Pages of a sequence at its full length."""
        return self.pages_for(self.max_tokens)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens of one sequence."""
        return -(-tokens // self.page_size)

    @property
    def num_pages(self) -> int:
        """Pages of the whole cache."""
        if self.cache_tokens:
            return self.cache_tokens // self.page_size
        # A prompt's broken page is held beside its copy: one more, for a single slot.
        return self.slots * self.pages_per_slot + 1
