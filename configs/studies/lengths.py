"""The budget of tokens of a completion, on `base.py`, whose completions have 17.

scalerl study run lengths && scalerl study report lengths

Thinking is interrupted between half and five eighths of the budget, as in the base, and
evaluations have the budget of their run.
"""

from scalerl_jax.study.design import Study


def get_study() -> Study:
    """Return budgets of 64 tokens, the base's, and of 48, 32 and 24."""
    return Study(
        base="configs/studies/base.py",
        arms={
            f"tokens_{most}": {
                "sampler.max_completion_tokens": most,
                "interruption.min_tokens": most // 2,
                "interruption.max_tokens": 5 * most // 8,
            }
            for most in (64, 48, 32, 24)
        },
        seeds=(0, 1, 2),
        steps=40,
    )
