"""The base checkpoint of `configs/tiny.py`: a mix of sound work, slips and guesses.

python -m scalerl_jax.demonstrations --config=configs/tiny_base.py
"""

import ml_collections

from scalerl_jax import demonstrations


def get_config() -> ml_collections.ConfigDict:
    """Return the defaults of `scalerl_jax/demonstrations.py`."""
    return demonstrations.defaults()
