"""IsoCompute on easy prompts, arXiv 2603.12151; Tan et al.'s coefficient.  Not yet run.

python -m scalerl_jax.main --config=configs/recipes/isocompute_easy.py:tiny \
    --workdir=runs/isocompute_easy
"""

from ml_collections import ConfigDict

from scalerl_jax.config import vanilla_grpo


def get_config(base: str = "8b") -> ConfigDict:
    """The recipe on `configs/{base}.py`."""
    config = vanilla_grpo(base, __file__)
    config.objective.update(anchor="recomputed", correction_cap=2.0)  # TIS
    config.objective.update(kl_coefficient=1e-3, kl_estimator="k3")
    config.objective.entropy_coefficient = 1e-3
    config.sampler.temperature = config.eval.temperature = 0.6
    config.optimizer.update(warmup_steps=10, base_rollouts=1024)
    return config
