"""The base of the studies: the tiny policy on tasks that it does not fully solve.

scalerl train --config=configs/studies/base.py --workdir=runs/study_base

Result, seeds 0, 1, 2: held-out pass rate 0.210, 0.224, 0.200 before, 0.676, 0.674,
0.691 at step 20 and 0.716, 0.740, 0.708 after 40 steps.  docs/studies.md says how the
tasks and the learning rate were found.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import based_on, scalerl_baseline

RECIPES = {"scalerl": based_on, "baseline": scalerl_baseline}


def get_config(recipe: str = "scalerl") -> ConfigDict:
    """Return ScaleRL, or its forward ablations' baseline, on tasks of five levels."""
    if recipe not in RECIPES:
        raise ValueError(f"--config=...:{recipe}: choose from {sorted(RECIPES)}")
    config = RECIPES[recipe]("tiny", __file__)
    config.data.tasks = (
        "chain_sum",
        "chain_sum_long",
        "spell_backward",
        "letter_counting",
        "gym:letter_counting(min_words=4,max_words=6)",
    )
    config.data.train_prompts = 600
    config.sampler.max_prompt_tokens = 64
    config.sampler.slots = 64
    config.batch.num_prompts = 16
    config.optimizer.learning_rate = 1e-4
    config.train.num_steps = 40
    config.eval.every = 4
    config.eval.num_prompts = 200
    # Evaluations of one seed share their random keys, so that more evaluations do not
    # average out the sampling error of completions: more completions do.
    config.eval.samples_per_prompt = 8
    config.eval.logged_rollouts = 0
    config.checkpoint.every = 32
    config.checkpoint.keep = 1
    return config
