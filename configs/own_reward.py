"""A reward in ten lines, `examples/own_reward.py`, learned from partial credit.

scalerl train --config=configs/own_reward.py --workdir=runs/own_reward

Result, seed 0: held-out pass rate 0.130 before, 0.810 after 60 steps, the mean reward
0.856 then, in five minutes on two busy cores.
"""

import runpy
from pathlib import Path

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Only what differs from `configs/tiny.py`."""
    here = Path(__file__).resolve()
    config = runpy.run_path(str(here.with_name("tiny.py")))["get_config"]()
    config.environment = f"{here.parents[1]}/examples/own_reward.py:score"
    config.data.tasks = ("chain_sum", "spell_backward")
    config.train.num_steps = 60
    config.eval.num_prompts = 100
    return config
