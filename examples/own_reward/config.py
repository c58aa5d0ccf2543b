"""The reward of `reward.py`, learned from partial credit.

scalerl train --config=examples/own_reward/config.py --workdir=runs/own_reward
"""

from pathlib import Path

import ml_collections

from scalerl_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    """Return the config called tiny with the changes below."""
    config = config_lib.named("tiny")
    config.update_from_flattened_dict(
        {
            "environment": f"{Path(__file__).resolve().with_name('reward.py')}:score",
            "data.tasks": ("chain_sum", "spell_backward"),
            "train.num_steps": 60,
            "eval.num_prompts": 100,
        }
    )
    return config
