"""Tunix `VanillaRollout` on the static batch: the sampler of its GRPO learner."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp  # after the environment is set
import work
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl.rollout import base_rollout
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

CACHE_LENGTH = work.PROMPT_TOKENS + work.MAX_NEW_TOKENS  # tokens


class IntegerTokenizer:
    """Text is the decimal token ids, so that prompts reach the sampler unchanged."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [int(part) for part in text.split()]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        """Return None: no token is before the prompt."""

    def eos_id(self) -> int:
        """Return the id that ends a text."""
        return work.EOS

    def pad_id(self) -> int:
        """Return the id that pads rows."""
        return work.PAD


def load_model(directory: pathlib.Path, workload: str) -> qwen3.Qwen3:
    """The workload's model in float32, by Tunix's own reader of Hugging Face files."""
    shape = work.WORKLOADS[workload]
    config = qwen3.ModelConfig(
        num_layers=shape["layers"],
        vocab_size=shape["vocab"],
        embed_dim=shape["hidden"],
        hidden_dim=shape["ffn"],
        num_heads=shape["heads"],
        num_kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        rope_theta=int(work.ROPE_THETA),
        norm_eps=work.NORM_EPS,
        use_tied_embedding=True,
    )
    return qwen3_params.create_model_from_safe_tensors(
        str(directory), config, dtype=jnp.float32
    )


def main() -> None:
    """Measure and print one JSON line."""
    options = work.contender_options().parse_args()
    shape = work.WORKLOADS[options.workload]
    rollout = VanillaRollout(
        load_model(options.weights, options.workload),
        IntegerTokenizer(),
        base_rollout.CacheConfig(
            cache_size=CACHE_LENGTH,
            num_layers=shape["layers"],
            num_kv_heads=shape["kv_heads"],
            head_dim=shape["head_dim"],
        ),
    )
    settings = base_rollout.RolloutConfig(
        max_tokens_to_generate=work.MAX_NEW_TOKENS,
        max_prompt_length=work.PROMPT_TOKENS,
        kv_cache_size=CACHE_LENGTH,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        eos_tokens=[-1],  # an id never drawn: every row runs to its 256th token
    )
    texts = [" ".join(map(str, ids)) for ids in work.repeated_prompts(options.workload)]

    def run() -> int:
        lengths = [len(tokens) for tokens in rollout.generate(texts, settings).tokens]
        assert lengths == [work.MAX_NEW_TOKENS] * work.SEQUENCES, "a row stopped early"
        return sum(lengths)

    work.report(
        "tunix",
        options.workload,
        packages=["google-tunix", "jax", "jaxlib", "flax"],
        useful=run,
        raw=None,
        static_batch=True,
    )


if __name__ == "__main__":
    main()
