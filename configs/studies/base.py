"""What the studies start from: the tiny policy on tasks that it does not come to solve.

scalerl train --config=configs/studies/base.py --workdir=runs/study_base
"""

import runpy
from pathlib import Path

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Only what differs from `configs/tiny.py`: tasks, sizes, and how it is judged."""
    tiny = runpy.run_path(str(Path(__file__).parents[1] / "tiny.py"))
    config = tiny["get_config"]()
    config.data.tasks = (
        "chain_sum",
        "chain_sum_long",
        "spell_backward",
        "letter_counting",
        "gym:letter_counting(min_words=4,max_words=6)",
    )
    config.data.train_prompts = 600  # 1.7 epochs
    config.sampler.max_prompt_tokens = 64
    config.sampler.slots = 64
    config.batch.num_prompts = 16
    config.optimizer.learning_rate = 1e-4
    config.train.num_steps = 64
    config.eval.every = 4
    config.eval.num_prompts = 200
    config.eval.samples_per_prompt = 2
    config.eval.logged_rollouts = 0
    config.checkpoint.every = 32
    config.checkpoint.keep = 1
    return config
