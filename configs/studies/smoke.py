"""Three arms of the laptop default, two seeds each, far too short to decide anything.

scalerl study run smoke && scalerl study report smoke

Result: six runs of twelve steps in two minutes on 2 cores; no winner.
"""

from scalerl_jax.study.design import Study


def get_study() -> Study:
    """Return arms of the loss's aggregation and of its clip, on very few prompts."""
    return Study(
        base="configs/tiny.py",
        common={
            "batch.num_prompts": 8,
            "optimizer.warmup_steps": 1,
            "eval.every": 2,
            "eval.num_prompts": 30,
            "eval.samples_per_prompt": 1,
            "checkpoint.every": 4,
        },
        arms={
            "prompt": {},
            "token": {"objective.aggregation": "token"},
            "clipped": {
                "objective.loss": "clipped",
                "objective.clip_low": 0.2,
                "objective.clip_high": 0.28,
            },
        },
        seeds=(0, 1),
        steps=12,
    )
