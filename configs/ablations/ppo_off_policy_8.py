"""ScaleRL's figure 5, "8op": 8 steps on what is generated together.  Not yet run.

scalerl train --config=configs/ablations/ppo_off_policy_8.py:tiny \
    --workdir=runs/ppo_off_policy_8

Published: A within 0.59 to 0.61 for every arm, as others read the figure.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import based_on


def get_config(base: str = "8b") -> ConfigDict:
    """Return ScaleRL with this one change, on `configs/{base}.py`."""
    config = based_on(base, __file__)
    config.queue.update(mode="batched", max_staleness=8)  # figure 5's name for it
    return config
