"""The small mixture's base checkpoint, made from the demo's.

python -m scalerl_jax.demonstrations --config=configs/tiny_moe_base.py \\
    --out=scalerl_jax/assets/tiny_moe_base
"""

import ml_collections

from scalerl_jax import demonstrations


def get_config() -> ml_collections.ConfigDict:
    """Return 8 experts, two per token: the active size is that of the demo's base."""
    config = demonstrations.defaults()
    config.init_from = "scalerl_jax/assets/tiny_base"
    config.num_experts = 8
    config.ffn_size = 192  # half of the demo's base
    config.skill_steps = 0
    config.num_steps = 120
    config.warmup_steps = 20
    config.learning_rate = 1e-3
    config.file_dtype = "bfloat16"  # 5 MB
    return config
