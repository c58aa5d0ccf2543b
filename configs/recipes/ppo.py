"""PPO with a critic, Open-Reasoner-Zero, arXiv 2503.24290, section 2.  Not yet run.

python -m scalerl_jax.main --config=configs/recipes/ppo.py:tiny --workdir=runs/ppo
"""

from ml_collections import ConfigDict

from scalerl_jax.config import vanilla_grpo


def get_config(base: str = "8b") -> ConfigDict:
    """The recipe on `configs/{base}.py`."""
    config = vanilla_grpo(base, __file__, num_prompts=128, group_size=64)
    config.objective.update(advantage="critic", advantage_normalization="batch")
    config.objective.aggregation = "token"
    config.optimizer.warmup_steps = 50
    return config
