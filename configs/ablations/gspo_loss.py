"""ScaleRL's figure 5, GSPO, clips 3e-3 and 5e-3, for CISPO.  Not yet run.

python -m scalerl_jax.main --config=configs/ablations/gspo_loss.py:tiny \
    --workdir=runs/gspo_loss
"""

from ml_collections import ConfigDict

from scalerl_jax.config import based_on


def get_config(base: str = "8b") -> ConfigDict:
    """ScaleRL but for this, on `configs/{base}.py`."""
    config = based_on(base, __file__)
    config.objective.update(loss="gspo", clip_low=3e-3, clip_high=5e-3)
    return config
