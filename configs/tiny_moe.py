"""A small mixture learns sums, spelling and counting: 8 experts, two of them a token.

python -m scalerl_jax.main --config=configs/tiny_moe.py --workdir=runs/tiny_moe

Not yet run.
"""

import runpy
from pathlib import Path

import ml_collections

import scalerl_jax


def get_config() -> ml_collections.ConfigDict:
    """Only what differs from `configs/tiny.py`."""
    tiny = runpy.run_path(str(Path(__file__).with_name("tiny.py")))
    config = tiny["get_config"]()
    base = Path(scalerl_jax.__file__).parent / "assets" / "tiny_moe_base"
    config.model.checkpoint = str(base)
    config.model.sampler_dtype = "bfloat16"
    config.objective.routing_replay = "on"
    config.optimizer.learning_rate = 4e-5
    config.train.num_steps = 120
    config.train.max_mismatch_nats = 0.02  # the sampler rounds to bfloat16
    return config
