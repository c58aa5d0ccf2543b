"""ScaleRL's second model, Llama 4 Scout 17Bx16, a mixture.  Not yet run.

scalerl train --config=configs/scout.py --workdir=/mnt/runs/scout \
    --config.model.checkpoint=/mnt/models/Llama-4-Scout-17B-16E

Numbers: https://arxiv.org/abs/2510.13786, appendix A.3, those of its 8B model, which
are the defaults.  It fits v5p:4x4x8 and v6e:16x16 (docs/moe.md), by the compiler:
scalerl preflight --config=configs/scout.py --topology=v5p:4x4x8
"""

import ml_collections

from scalerl_jax import config as config_lib
from scalerl_jax.config.bases import ask_polaris


def get_config() -> ml_collections.ConfigDict:
    """Return only what differs from `scalerl_jax/config`."""
    config = config_lib.defaults()
    config.model.architecture = "scout"
    config.model.compute_dtype = "bfloat16"
    config.model.sampler_dtype = "bfloat16"
    config.model.remat = "auto"  # the least that fits into memory
    config.model.head_chunk_vocab = 0  # all of it, if it fits
    ask_polaris(config)
    config.batch.rows_per_microbatch = 0  # one per shard
    config.batch.short_rows = True
    # The split of a TPU slice with the shortest step, and slots and a cache that fit.
    # A version is 201 GiB: a replica may need the chips of several hosts.
    config.mesh.data = 0
    config.mesh.fsdp = 0
    config.mesh.tensor = 0
    config.generators.count = 0
    config.generators.versions = 0
    config.eval.concurrent = "auto"  # beside the run if that is shorter
    config.sampler.slots = 0
    return config
