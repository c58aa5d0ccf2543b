"""ScaleRL, arXiv 2510.13786, thinking ends by itself.  Not yet run.

scalerl train --config=configs/ablations/no_interruption.py:tiny \
    --workdir=runs/no_interruption

Not an arm of the paper's figure 5, which has a length penalty in place of interruptions
(`length_penalty.py`).
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import based_on


def get_config(base: str = "8b") -> ConfigDict:
    """Return ScaleRL with this one change, on `configs/{base}.py`."""
    config = based_on(base, __file__)
    config.interruption.enabled = False
    return config
