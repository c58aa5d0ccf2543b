"""ScaleRL's recipe for Qwen3-30B-A3B, a mixture of 128 experts.  Not yet run.

scalerl train --config=configs/qwen3_30b_a3b.py \
    --workdir=/mnt/runs/qwen3_30b_a3b \
    --config.model.checkpoint=/mnt/models/Qwen3-30B-A3B

The paper's numbers for 8B are kept.  What fits, and what a step costs:
scalerl preflight --config=configs/qwen3_30b_a3b.py --topology=v5p:4x4x4
"""

import ml_collections

from scalerl_jax import config as config_lib
from scalerl_jax.config.bases import ask_polaris


def get_config() -> ml_collections.ConfigDict:
    """Return only what differs from `scalerl_jax/config`."""
    config = config_lib.defaults()
    config.model.architecture = "qwen3-30b-a3b"
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
