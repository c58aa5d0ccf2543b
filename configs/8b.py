"""ScaleRL's recipe for an 8B policy, with the paper's numbers.  Not yet run.

python -m scalerl_jax.main --config=configs/8b.py --workdir=/mnt/runs/8b \
    --config.model.checkpoint=/mnt/models/Llama-3.1-8B

Qwen3-8B: --config.model.architecture=qwen3-8b, and its directory as the checkpoint.
Numbers: https://arxiv.org/abs/2510.13786, appendix A.3; the defaults hold the others.
The prompts: python -m scalerl_jax.data prepare --dataset=polaris_53k.  A model with a
chat template: --config.data.template=chat --config.data.answer_after=auto.

What fits, and on which TPUs: python -m scalerl_jax.preflight --config=configs/8b.py
--topology=v5p:4x4x4.  The sampler is small enough for chips of 16 GiB; with more memory
more decodes at once: --config.sampler.cache_tokens=2_000_000 --config.sampler.slots=256
on v5p, 800_000 and 128 on v6e.
"""

import ml_collections

from scalerl_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    """Only what differs from `scalerl_jax/config`."""
    config = config_lib.defaults()
    config.model.architecture = "llama3.1-8b"
    config.model.compute_dtype = "bfloat16"
    config.model.sampler_dtype = "bfloat16"
    config.model.remat = "full"
    config_lib.ask_polaris(config)
    # 300,000 tokens at 128 KiB each: 4.6 GiB on each of the sampler's 8 chips, twice
    # while an evaluation runs.
    config.sampler.cache_tokens = 300_000
    config.sampler.slots = 64
    # 48 prompts x 16 completions; 2,048 + 14,336 tokens: the defaults.
    config.batch.rows_per_microbatch = 0  # one for each shard
    config.mesh.fsdp = 0  # as many trainers as the devices allow
    config.generators.devices = 8  # one generator, as many as kv heads
    return config
