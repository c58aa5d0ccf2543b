"""Low-rank factors of rank 1, 8 and 32 beside all weights, on `base.py`.

scalerl study run lora && scalerl study report lora

The factors' learning rate is ten times that of the weights, which
https://thinkingmachines.ai/blog/lora finds for factors of any rank with alpha = 32.

Result: docs/lora.md.
"""

from scalerl_jax.study.design import Study


def get_study() -> Study:
    """Return all weights and three ranks; every rank is compared with all weights."""
    ranks = {
        f"rank_{rank}": {"model.lora.rank": rank, "optimizer.learning_rate": 1e-3}
        for rank in (1, 8, 32)
    }
    return Study(
        base="configs/studies/base.py",
        common={"eval.samples_per_prompt": 2},
        arms={"all_weights": {}} | ranks,
        seeds=(0, 1, 2),
        steps=24,
    )
