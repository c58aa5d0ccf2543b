"""The base checkpoint of `configs/tiny.py`: a mix of sound work, slips and guesses.

scalerl warmstart --config=configs/tiny_base.py
"""

import ml_collections

from scalerl_jax import warmstart


def get_config() -> ml_collections.ConfigDict:
    """Return the defaults of `scalerl_jax/warmstart.py`."""
    return warmstart.defaults()
