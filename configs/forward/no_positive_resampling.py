"""ScaleRL's section 3, arXiv 2510.13786: no-positive-resampling.  Not yet run.

scalerl train --config=configs/forward/no_positive_resampling.py:tiny \
    --workdir=runs/no_positive_resampling

Published: part of the final recipe; its effect on the baseline is not known here.  It
does not change the tokens of a step (appendix A.20 of the later version).
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import scalerl_baseline


def get_config(base: str = "8b") -> ConfigDict:
    """Return the baseline with this one change, on `configs/{base}.py`."""
    config = scalerl_baseline(base, __file__)
    config.data.no_positive_resampling = True
    return config
