"""IsoCompute on hard prompts, arXiv 2603.12151: no regulariser.  Not yet run.

scalerl train --config=configs/recipes/isocompute_hard.py:tiny \
    --workdir=runs/isocompute_hard
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import vanilla_grpo


def get_config(base: str = "8b") -> ConfigDict:
    """Return the recipe on `configs/{base}.py`."""
    config = vanilla_grpo(base, __file__, warmup_steps=10)  # the paper's
    # TIS; the cap is that of verl's documentation, assumed here.
    config.objective.update(anchor="recomputed", correction_cap=2.0)
    config.sampler.temperature = config.eval.temperature = 0.6  # the paper's
    # The paper's: a rate of 1e-6 * sqrt(rollouts / 1024).
    config.optimizer.base_rollouts = 1024
    return config
