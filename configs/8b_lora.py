"""An 8B policy by low-rank factors beside bfloat16 weights, on one host.  Not yet run.

scalerl train --config=configs/8b_lora.py --workdir=/mnt/runs/8b_lora \
    --config.model.checkpoint=/mnt/models/Llama-3.1-8B

Everything else is as in 8b.py, which needs eight times the chips.  Method and
measurements: docs/lora.md; what fits: docs/preflight.md.
"""

import ml_collections

from scalerl_jax import config as config_lib
from scalerl_jax.config.bases import ask_polaris


def get_config() -> ml_collections.ConfigDict:
    """Return only what differs from `scalerl_jax/config`."""
    config = config_lib.defaults()
    config.model.architecture = "llama3.1-8b"
    config.model.param_dtype = "bfloat16"  # of the frozen weights
    config.model.compute_dtype = "bfloat16"
    config.model.sampler_dtype = "bfloat16"
    config.model.remat = "auto"  # the least that fits into memory
    config.model.head_chunk_vocab = 0  # all of it, if it fits
    config.model.lora.rank = 32
    # Ten times 8b.py's: https://thinkingmachines.ai/blog/lora
    config.optimizer.learning_rate = 5e-6
    ask_polaris(config)
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
