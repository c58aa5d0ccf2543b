"""The base checkpoint of `configs/tools.py`: guesses, and now and then a call.

python -m scalerl_jax.demonstrations --config=configs/tools_base.py \\
    --out=scalerl_jax/assets/tools_base
"""

import ml_collections

from scalerl_jax import demonstrations


def get_config() -> ml_collections.ConfigDict:
    """Return the demo's base, which learns to call a calculator, but seldom does.

    Otherwise it guesses the product, which it cannot compute in its head.
    """
    config = demonstrations.defaults()
    config.init_from = "scalerl_jax/assets/tiny_base"
    config.tasks = ("products",)
    config.tool_calls = 0.15
    config.careful = 0.0
    config.careless = 0.0
    config.hesitation = 0.0
    config.slip = 0.35
    config.skill_steps = 0
    config.num_steps = 500
    config.warmup_steps = 20
    config.learning_rate = 1e-3
    config.file_dtype = "bfloat16"  # 1.6 MB
    return config
