"""ScaleRL's recipe for an 8B policy that may think for 32,768 tokens.  Not yet run.

scalerl train --config=configs/8b_32k.py --workdir=/mnt/runs/8b_32k \
    --config.model.checkpoint=/mnt/models/Llama-3.1-8B

The paper's long run: 2,048 prompt + 32,768 thinking + 2,048 answer tokens, a budget of
34k for generation.  Everything else is as in 8b.py.  A row holds one rollout of the
greatest length; on chips with less memory cut it: --config.mesh.context=2.
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
    config.sampler.max_completion_tokens = 32_768 + 2_048
    # The paper states [10k, 12k] for a budget of 14k; this leaves the same answer.
    config.interruption.min_tokens = 30_000
    config.interruption.max_tokens = 32_000
    config.batch.row_tokens = 2_048 + 32_768 + 2_048  # 128 x 288
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
