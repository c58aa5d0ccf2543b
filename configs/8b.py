"""ScaleRL's recipe for an 8B policy, with the paper's numbers.  Not yet run.

scalerl train --config=configs/8b.py --workdir=/mnt/runs/8b \
    --config.model.checkpoint=/mnt/models/Llama-3.1-8B

Qwen3-8B: --config.model.architecture=qwen3-8b, and its directory as the checkpoint.
Numbers: https://arxiv.org/abs/2510.13786, appendix A.3; the others are the defaults.
The prompts: scalerl data prepare --dataset=polaris_53k.  A model with a
chat template: --config.data.template=chat --config.data.answer_after=auto.

What fits, on which TPUs, and what a step costs: scalerl preflight
--config=configs/8b.py --topology=v5p:4x4x4.  On other devices replace the zeros below
by numbers that fit: --config.sampler.slots=64 --config.sampler.cache_tokens=300_000.
"""

import ml_collections

from scalerl_jax import config as config_lib
from scalerl_jax.config.bases import ask_polaris


def get_config() -> ml_collections.ConfigDict:
    """Return only what differs from `scalerl_jax/config`."""
    config = config_lib.defaults()
    config.model.architecture = "llama3.1-8b"
    config.model.compute_dtype = "bfloat16"
    config.model.sampler_dtype = "bfloat16"
    config.model.remat = "auto"  # the least that fits into memory
    config.model.head_chunk_vocab = 0  # all of it, if it fits
    ask_polaris(config)
    # 48 prompts x 16 completions; 2,048 + 14,336 tokens: the defaults.
    config.batch.rows_per_microbatch = 0  # one per shard
    config.batch.short_rows = True
    # The split of a TPU slice with the shortest step, and slots and a cache that fit.
    config.mesh.data = 0
    config.mesh.fsdp = 0
    config.generators.count = 0
    config.generators.versions = 0
    config.eval.concurrent = "auto"  # beside the run if that is shorter
    config.sampler.slots = 0
    return config
