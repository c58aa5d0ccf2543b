"""ScaleRL's section 3, arXiv 2510.13786: a zero-variance filter.  Not yet run.

scalerl train --config=configs/forward/zero_variance_filter.py:tiny \
    --workdir=runs/zero_variance_filter

Published: part of the final recipe; its effect on the baseline is not known here.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import scalerl_baseline


def get_config(base: str = "8b") -> ConfigDict:
    """Return the baseline with this one change, on `configs/{base}.py`."""
    config = scalerl_baseline(base, __file__)
    config.objective.zero_variance_filter = True
    return config
