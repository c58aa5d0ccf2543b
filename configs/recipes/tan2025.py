"""GRPO with KL, Tan et al., arXiv 2509.25300, and their scripts.  Not yet run.

scalerl train --config=configs/recipes/tan2025.py:tiny \
    --workdir=runs/tan2025 --config.data.difficulty=difficulty.jsonl

The curriculum needs a pass rate for each prompt; they sort by Qwen2.5-7B-Instruct's:
scalerl data difficulty --config=configs/tiny.py --samples=8 \
    --out=difficulty.jsonl
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import vanilla_grpo


def get_config(base: str = "8b") -> ConfigDict:
    """Return the recipe on `configs/{base}.py`."""
    # 512 prompts x 8 in 4 updates: their script.
    config = vanilla_grpo(base, __file__, num_prompts=128, group_size=8)
    config.objective.update(anchor="recomputed", aggregation="token")  # verl's, assumed
    config.objective.update(kl_coefficient=1e-3, kl_estimator="k3")  # their script
    config.data.order = "easy_to_hard"
    config.queue.update(mode="batched", max_staleness=4)  # their script
    config.eval.temperature = 0.7  # their script
    return config
