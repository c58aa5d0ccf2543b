"""Dr. GRPO, arXiv 2503.20783, section 3.2 and appendix.  Not yet run.

scalerl train --config=configs/recipes/dr_grpo.py:tiny \
    --workdir=runs/dr_grpo
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import vanilla_grpo


def get_config(base: str = "8b") -> ConfigDict:
    """Return the recipe on `configs/{base}.py`."""
    # Assumed: 128 prompts x 8.
    config = vanilla_grpo(base, __file__, num_prompts=128, group_size=8)
    config.objective.update(aggregation="constant", advantage_normalization="none")
    return config
