"""GRPO with KL, Tan et al., arXiv 2509.25300, and their scripts.  Not yet run.

python -m scalerl_jax.main --config=configs/recipes/tan2025.py:tiny \
    --workdir=runs/tan2025
"""

from ml_collections import ConfigDict

from scalerl_jax.config import vanilla_grpo


def get_config(base: str = "8b") -> ConfigDict:
    """The recipe on `configs/{base}.py`."""
    config = vanilla_grpo(base, __file__, num_prompts=128, group_size=8)
    config.objective.update(anchor="recomputed", aggregation="token")
    config.objective.update(kl_coefficient=1e-3, kl_estimator="k3")
    config.data.order = "easy_to_hard"
    config.queue.update(mode="batched", max_staleness=4)
    config.eval.temperature = 0.7
    return config
