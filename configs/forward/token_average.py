"""ScaleRL's section 3, arXiv 2510.13786: token average.  Not yet run.

scalerl train --config=configs/forward/token_average.py:tiny \
    --workdir=runs/token_average

Published: prompt average has the best A (text, without a number); that this is the
third of the arms is assumed.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import scalerl_baseline


def get_config(base: str = "8b") -> ConfigDict:
    """Return the baseline with this one change, on `configs/{base}.py`."""
    config = scalerl_baseline(base, __file__)
    config.objective.aggregation = "token"
    return config
