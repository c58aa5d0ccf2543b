"""Magistral, arXiv 2506.10910, section 2.1; without its length reward.  Not yet run.

scalerl train --config=configs/recipes/magistral.py:tiny \
    --workdir=runs/magistral
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import vanilla_grpo


def get_config(base: str = "8b") -> ConfigDict:
    """Return the recipe on `configs/{base}.py`."""
    config = vanilla_grpo(base, __file__)
    # Assumed: the greatest of the upper clips that the paper names.
    config.objective.update(clip_high=0.28, zero_variance_filter=True)
    config.objective.aggregation = "prompt"  # 1 / tokens of the group
    config.objective.advantage_normalization = "batch"
    config.queue.max_staleness = 8  # assumed: asynchronous; theirs is not bounded
    return config
