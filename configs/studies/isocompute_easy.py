"""The best number of completions per prompt on prompts that are often solved.

scalerl study run isocompute_easy && scalerl study export isocompute_easy
scalerl plan studies/isocompute_easy --x step --budget 2000 --budget 5600 \
    --rollouts-per-prompt rollouts_per_prompt --prompts-per-step prompts_per_step

IsoCompute, https://arxiv.org/abs/2603.12151, with ScaleRL's objective in place of its
own: n of 2 to 32 at 16 prompts a step, equal sampled tokens, and a learning rate that
grows with the square root of the rollouts of a step.  The base solves 42 and 23 % of
these two tasks; `isocompute_hard.py` has two of which it solves 10 to 14 %.

Result: 2 to 4 completions are the best up to where the first runs end, 5,600 rollouts;
whether n* grows is undecided; docs/studies.md.
"""

from collections.abc import Sequence

from scalerl_jax.study.design import Study

EASY = ("letter_counting", "gym:letter_counting(min_words=4,max_words=6)")
_PROMPTS = 16


def sweep(tasks: Sequence[str]) -> Study:
    """Return a sweep over completions per prompt on the given tasks."""
    return Study(
        base="configs/studies/base.py",
        common={
            "data.tasks": tuple(tasks),
            "batch.num_prompts": _PROMPTS,
            "optimizer.base_rollouts": 128,
            "eval.samples_per_prompt": 4,
        },
        arms={
            f"n{n}": {"batch.group_size": n, "eval.every": 32 // n}
            for n in (8, 2, 4, 16, 32)
        },
        seeds=(0, 1, 2),
        steps=256,
        tokens=130_000,
    )


def get_study() -> Study:
    """Return the sweep on easy prompts."""
    return sweep(EASY)
