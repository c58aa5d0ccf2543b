"""ScaleRL's figure 5, DAPO's clips, 0.2 and 0.26, for CISPO.  Not yet run.

scalerl train --config=configs/ablations/dapo_loss.py:tiny \
    --workdir=runs/dapo_loss

Published: A stays 0.61, B is 1.77 for 2.01 (at a shared A).
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import based_on


def get_config(base: str = "8b") -> ConfigDict:
    """Return ScaleRL with this one change, on `configs/{base}.py`."""
    config = based_on(base, __file__)
    # Appendix: the clips of ScaleRL's DAPO.
    config.objective.update(loss="clipped", clip_low=0.2, clip_high=0.26)
    return config
