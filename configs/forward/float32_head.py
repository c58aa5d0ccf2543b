"""ScaleRL's section 3, arXiv 2510.13786: a float32 head.  Not yet run.

scalerl train --config=configs/forward/float32_head.py \
    --workdir=/mnt/runs/float32_head --config.model.checkpoint=/mnt/models/Llama-3.1-8B

Published: A 0.52 -> 0.61 (text; figure 4c).  Refused on a base that computes in
float32, as the tiny policy does: the baseline's head is float32 there, too.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import scalerl_baseline


def get_config(base: str = "8b") -> ConfigDict:
    """Return the baseline with this one change, on `configs/{base}.py`."""
    config = scalerl_baseline(base, __file__)
    if config.model.float32_head:
        raise ValueError(
            f"configs/forward/float32_head.py:{base} would change nothing: that base "
            f"computes in float32, and so does its head; take one that computes in "
            f"bfloat16, as 8b does"
        )
    config.model.float32_head = True
    return config
