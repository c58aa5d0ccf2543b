"""GSPO, arXiv 2507.18071, sections 4 and 5.1, 4 updates a window.  Not yet run.

scalerl train --config=configs/recipes/gspo.py:tiny --workdir=runs/gspo
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import vanilla_grpo


def get_config(base: str = "8b") -> ConfigDict:
    """Return the recipe on `configs/{base}.py`."""
    config = vanilla_grpo(base, __file__)
    # Section 5.1.
    config.objective.update(loss="gspo", clip_low=3e-4, clip_high=4e-4)
    config.queue.update(mode="batched", max_staleness=4)  # section 5.1
    return config
