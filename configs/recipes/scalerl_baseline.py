"""The baseline of ScaleRL's section 3, arXiv 2510.13786.  Not yet run.

scalerl train --config=configs/recipes/scalerl_baseline.py:tiny \
    --workdir=runs/scalerl_baseline

GRPO without a KL, DAPO's asymmetric clip, sample average, advantages by the prompt's
standard deviation, 8 steps on what is generated together, no float32 head, no filter,
every prompt again and again (section 2).  Batch, lengths and optimizer are ScaleRL's
own.  Published: A about 0.52, unstable from some 3,500 GPU-hours on.  What changes one
thing of it is in `configs/forward`.  On the tiny policy, which computes in float32, the
head is left as it is.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import scalerl_baseline


def get_config(base: str = "8b") -> ConfigDict:
    """The recipe on `configs/{base}.py`."""
    return scalerl_baseline(base, __file__)
