"""ScaleRL's figure 5, solved prompts are sampled again.  Not yet run.

scalerl train --config=configs/ablations/uniform_sampling.py:tiny \
    --workdir=runs/uniform_sampling

Published: A within 0.59 to 0.61 for every arm, as others read the figure.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import based_on


def get_config(base: str = "8b") -> ConfigDict:
    """Return ScaleRL with this one change, on `configs/{base}.py`."""
    config = based_on(base, __file__)
    config.data.no_positive_resampling = False
    return config
