"""The demo's policy learns by factors of rank 8 beside frozen weights.

scalerl train --config=examples/lora/config.py --workdir=runs/lora
"""

import ml_collections

from scalerl_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    """Only what differs from the config called tiny."""
    config = config_lib.named("tiny")
    config.update_from_flattened_dict(
        {
            "model.lora.rank": 8,
            "optimizer.learning_rate": 2e-4,  # ten times that of the weights
            "train.num_steps": 180,
            "eval.every": 20,
        }
    )
    return config
