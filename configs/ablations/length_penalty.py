"""ScaleRL's figure 5, a penalty in place of interruptions.  Not yet run.

scalerl train --config=configs/ablations/length_penalty.py:tiny \
    --workdir=runs/length_penalty

L_max = 14k and L_cache = 2k, on correct completions: appendix A.3.  Published: A stays
0.61, as others read the figure.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import based_on


def get_config(base: str = "8b") -> ConfigDict:
    """Return ScaleRL with this one change, on `configs/{base}.py`."""
    config = based_on(base, __file__)
    config.interruption.enabled = False
    most = config.sampler.max_completion_tokens
    # Appendix A.3: the last 2k of 14k.
    config.objective.update(overlong_cache_tokens=most // 7, overlong_on="correct")
    return config
