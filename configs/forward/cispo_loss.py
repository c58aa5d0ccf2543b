"""ScaleRL's section 3, arXiv 2510.13786: CISPO for DAPO's clip.  Not yet run.

scalerl train --config=configs/forward/cispo_loss.py:tiny \
    --workdir=runs/cispo_loss

Published: A 0.520 -> 0.595 (figure 4b, as four texts read it, +- 0.005).
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import scalerl_baseline


def get_config(base: str = "8b") -> ConfigDict:
    """Return the baseline with this one change, on `configs/{base}.py`."""
    config = scalerl_baseline(base, __file__)
    # The cap stays at 5: 4, 5 and 8 are alike, appendix.
    config.objective.update(loss="cispo", clip_low=0.0, clip_high=0.0)
    return config
