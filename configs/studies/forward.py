"""One change at a time to the baseline of ScaleRL's section 3, on `base.py`.

scalerl study run forward && scalerl study report forward

The baseline is that of `scalerl_jax/config/bases.py`: GRPO without a KL, DAPO's clip,
sample average, advantages by the prompt's standard deviation, 8 steps per batch that is
generated together, no filter, solved prompts sampled again.  Everything is float32
here, the head too.  GSPO's clips are the paper's, for completions of thousands of
tokens, and clips ten times as wide, as completions here have 17 tokens and move more.

Result: docs/studies.md.  Its data have two more seeds of `dapo` and `cispo`, which were
run by a copy of this file with these two arms and seeds 3 and 4.
"""

from scalerl_jax.study.design import Study


def get_study() -> Study:
    """Return the arms, losses first, since arms start in this order."""
    return Study(
        base="configs/studies/base.py:baseline",
        # At the ends of windows: within one, all its tokens are counted from the start.
        common={"eval.every": 8, "eval.samples_per_prompt": 4},
        arms={
            "dapo": {},
            "cispo": {
                "objective.loss": "cispo",
                "objective.clip_low": 0.0,
                "objective.clip_high": 0.0,
            },
            "gspo": {
                "objective.loss": "gspo",
                "objective.clip_low": 3e-3,
                "objective.clip_high": 5e-3,
            },
            "gspo_wide": {
                "objective.loss": "gspo",
                "objective.clip_low": 3e-2,
                "objective.clip_high": 4.5e-2,
            },
            "prompt_average": {"objective.aggregation": "prompt"},
            "token_average": {"objective.aggregation": "token"},
            "batch_normalization": {"objective.advantage_normalization": "batch"},
            "no_normalization": {"objective.advantage_normalization": "none"},
            "zero_variance_filter": {"objective.zero_variance_filter": True},
            "no_positive_resampling": {"data.no_positive_resampling": True},
            "pipeline_rl_8": {"queue.mode": "pipeline"},
        },
        seeds=(0, 1, 2),
        steps=64,
    )
