"""GRPO, arXiv 2402.03300, section 4.2; clips as in ScaleRL's appendix.  Not yet run.

scalerl train --config=configs/recipes/grpo.py:tiny --workdir=runs/grpo
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import vanilla_grpo


def get_config(base: str = "8b") -> ConfigDict:
    """Return the recipe on `configs/{base}.py`."""
    # Assumed: 64 completions for each of 16 prompts, and the coefficient.
    config = vanilla_grpo(base, __file__, num_prompts=16, group_size=64)
    config.objective.update(kl_coefficient=0.04, kl_estimator="k3")  # assumed
    return config
