"""The baseline of ScaleRL's section 3, arXiv 2510.13786.  Not yet run.

scalerl train --config=configs/recipes/scalerl_baseline.py:tiny \
    --workdir=runs/scalerl_baseline

GRPO without a KL, DAPO's asymmetric clip, sample average, advantages by the prompt's
standard deviation, 8 steps per batch that is generated together, no float32 head, no
filter, solved prompts sampled again (section 2).  Batch, lengths and optimizer are
ScaleRL's own.  Published: A about 0.52, unstable from some 3,500 GPU-hours on.  Single
changes to it are in `configs/forward`.  On the tiny policy, which computes in float32,
the head is unchanged.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import scalerl_baseline


def get_config(base: str = "8b") -> ConfigDict:
    """Return the recipe on `configs/{base}.py`."""
    return scalerl_baseline(base, __file__)
