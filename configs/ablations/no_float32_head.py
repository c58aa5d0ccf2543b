"""ScaleRL's figure 5, logits in the dtype of the activations.  Not yet run.

scalerl train --config=configs/ablations/no_float32_head.py \
    --workdir=/mnt/runs/no_float32_head \
    --config.model.checkpoint=/mnt/models/Llama-3.1-8B

Published: A stays 0.61, as others read the figure.  Refused on a base that computes in
float32, as the tiny policy does: nothing would change.
"""

from ml_collections import ConfigDict

from scalerl_jax.config.bases import based_on


def get_config(base: str = "8b") -> ConfigDict:
    """Return ScaleRL with this one change, on `configs/{base}.py`."""
    config = based_on(base, __file__)
    config.model.float32_head = False
    return config
