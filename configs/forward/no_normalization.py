"""ScaleRL's section 3, arXiv 2510.13786: advantages without a scale.  Not yet run.

scalerl train --config=configs/forward/no_normalization.py:tiny \
    --workdir=runs/no_normalization

Published: alike by prompt, by batch and without (text).
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import scalerl_baseline


def get_config(base: str = "8b") -> ConfigDict:
    """Return the baseline with this one change, on `configs/{base}.py`."""
    config = scalerl_baseline(base, __file__)
    config.objective.advantage_normalization = "none"
    return config
