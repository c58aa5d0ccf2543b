"""ScaleRL, arXiv 2510.13786, with GSPO for CISPO.  Not yet run.

scalerl train --config=configs/ablations/gspo_loss.py:tiny \
    --workdir=runs/gspo_loss

Not an arm of the paper's figure 5: GSPO is only in the forward comparison, as
`configs/forward/gspo_loss.py`.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import based_on


def get_config(base: str = "8b") -> ConfigDict:
    """Return ScaleRL with this one change, on `configs/{base}.py`."""
    config = based_on(base, __file__)
    # Appendix: 5e-3 above and 3e-3 below did best.
    config.objective.update(loss="gspo", clip_low=3e-3, clip_high=5e-3)
    return config
