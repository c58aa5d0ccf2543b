"""ScaleRL's section 3, arXiv 2510.13786: PipelineRL-8.  Not yet run.

scalerl train --config=configs/forward/pipeline_rl_8.py:tiny \
    --workdir=runs/pipeline_rl_8

Published: A about 0.52 for both (figure 4a, as one text reads it).  The gain is time:
per step both are nearly alike (appendix A.20 of the later version).
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import scalerl_baseline


def get_config(base: str = "8b") -> ConfigDict:
    """Return the baseline with this one change, on `configs/{base}.py`."""
    config = scalerl_baseline(base, __file__)
    config.queue.mode = "pipeline"
    return config
