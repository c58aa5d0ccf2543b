"""The making of the small mixture's base checkpoint, in `scalerl_jax/assets`.

python -m scalerl_jax.warmstart --config=configs/tiny_moe_base.py \\
    --out=scalerl_jax/assets/tiny_moe_base
"""

import ml_collections

from scalerl_jax import warmstart


def get_config() -> ml_collections.ConfigDict:
    """Eight experts, two of them for a token: active is what the demo's base has."""
    config = warmstart.defaults()
    config.num_experts = 8
    config.ffn_size = 192
    config.skill_steps = 750
    config.num_steps = 1000
    config.file_dtype = "bfloat16"  # 5 MB
    return config
