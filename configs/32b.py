"""ScaleRL's recipe for Qwen3-32B.  Not yet run.

scalerl train --config=configs/32b.py --workdir=/mnt/runs/32b \
    --config.model.checkpoint=/mnt/models/Qwen3-32B

The paper's numbers for 8B are kept; it has no dense model of this size.  For v5p:4x4x8
and larger: scalerl preflight says what fits.
"""

import ml_collections

from scalerl_jax import config as config_lib
from scalerl_jax.config.bases import ask_polaris


def get_config() -> ml_collections.ConfigDict:
    """Return only what differs from `scalerl_jax/config`."""
    config = config_lib.defaults()
    config.model.architecture = "qwen3-32b"
    config.model.compute_dtype = "bfloat16"
    config.model.sampler_dtype = "bfloat16"
    config.model.remat = "auto"  # the least that fits into memory
    config.model.head_chunk_vocab = 0  # all of it, if it fits
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
