"""ScaleRL, arXiv 2510.13786, section 3.2: the defaults.  Not yet run.

scalerl train --config=configs/recipes/scalerl.py:tiny \
    --workdir=runs/scalerl
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import based_on


def get_config(base: str = "8b") -> ConfigDict:
    """Return the recipe on `configs/{base}.py`."""
    return based_on(base, __file__)
