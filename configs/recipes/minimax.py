"""CISPO of MiniMax-M1 (cap: ScaleRL's), arXiv 2506.13585, section 3.1.  Not yet run.

scalerl train --config=configs/recipes/minimax.py:tiny \
    --workdir=runs/minimax

The paper does not publish its cap.  Its optimizer's eps and betas are ScaleRL's too;
batch and learning rate are ScaleRL's.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import based_on


def get_config(base: str = "8b") -> ConfigDict:
    """Return the recipe on `configs/{base}.py`."""
    config = based_on(base, __file__)
    config.objective.advantage_normalization = "prompt"
    # DAPO's punishment, section 3.1; assumed: DAPO's share of the length.
    config.objective.overlong_cache_tokens = config.sampler.max_completion_tokens // 5
    config.data.no_positive_resampling = config.interruption.enabled = False
    config.batch.dynamic_sampling = True
    config.queue.update(mode="batched", max_staleness=16)  # section 3.1
    return config
