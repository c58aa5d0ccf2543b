"""ScaleRL's figure 5, "batch": groups of equal rewards count.  Not yet run.

scalerl train --config=configs/ablations/no_zero_variance_filter.py:tiny \
    --workdir=runs/no_zero_variance_filter

Published: A within 0.59 to 0.61 for every arm, as others read the figure.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import based_on


def get_config(base: str = "8b") -> ConfigDict:
    """Return ScaleRL with this one change, on `configs/{base}.py`."""
    config = based_on(base, __file__)
    config.objective.zero_variance_filter = False
    return config
