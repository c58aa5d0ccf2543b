"""ScaleRL's section 3, arXiv 2510.13786: prompt average.  Not yet run.

scalerl train --config=configs/forward/prompt_average.py:tiny \
    --workdir=runs/prompt_average

Published: the best A of the ways to average (text, without a number).
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import scalerl_baseline


def get_config(base: str = "8b") -> ConfigDict:
    """Return the baseline with this one change, on `configs/{base}.py`."""
    config = scalerl_baseline(base, __file__)
    config.objective.aggregation = "prompt"
    return config
