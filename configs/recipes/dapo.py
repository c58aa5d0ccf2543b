"""DAPO, arXiv 2503.14476, sections 3 and 4.1, 16 updates a window.  Not yet run.

scalerl train --config=configs/recipes/dapo.py:tiny --workdir=runs/dapo
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import vanilla_grpo


def get_config(base: str = "8b") -> ConfigDict:
    """Return the recipe on `configs/{base}.py`."""
    # 512 prompts x 16 in 16 updates, section 4.1; assumed: a warm-up of 20 rollout
    # steps, which are 20 x 16 updates.
    config = vanilla_grpo(
        base, __file__, num_prompts=32, group_size=16, warmup_steps=20 * 16
    )
    config.objective.update(clip_high=0.28, aggregation="token")  # section 4.1
    most = config.sampler.max_completion_tokens
    config.objective.overlong_cache_tokens = most // 5  # 4,096 of 20,480: their code
    config.objective.zero_variance_filter = config.batch.dynamic_sampling = True
    config.queue.update(mode="batched", max_staleness=16)  # section 4.1
    return config
