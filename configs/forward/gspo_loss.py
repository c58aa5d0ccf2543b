"""ScaleRL's section 3, arXiv 2510.13786: GSPO for DAPO's clip.  Not yet run.

scalerl train --config=configs/forward/gspo_loss.py:tiny \
    --workdir=runs/gspo_loss

Published: A 0.520 -> about 0.595 (figure 4b, as one text reads it).  Some of the
paper's GSPO runs diverged in the middle.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import scalerl_baseline


def get_config(base: str = "8b") -> ConfigDict:
    """Return the baseline with this one change, on `configs/{base}.py`."""
    config = scalerl_baseline(base, __file__)
    # Appendix: 5e-3 above and 3e-3 below did best.
    config.objective.update(loss="gspo", clip_low=3e-3, clip_high=5e-3)
    return config
