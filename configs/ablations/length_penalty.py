"""ScaleRL's figure 5, a penalty in place of interruptions.  Not yet run.

python -m scalerl_jax.main --config=configs/ablations/length_penalty.py:tiny \
    --workdir=runs/length_penalty
L_max = 14k and L_cache = 2k, on correct completions: appendix A.3.
"""

from ml_collections import ConfigDict

from scalerl_jax.config import based_on


def get_config(base: str = "8b") -> ConfigDict:
    """ScaleRL but for this, on `configs/{base}.py`."""
    config = based_on(base, __file__)
    config.interruption.enabled = False
    most = config.sampler.max_completion_tokens
    config.objective.update(overlong_cache_tokens=most // 7, overlong_on="correct")
    return config
