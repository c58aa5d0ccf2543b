"""ScaleRL in JAX: reinforcement learning of language models, made predictable."""

import os

from scalerl_jax.machines.platforms import PLATFORMS, platforms

__version__ = "0.2.0"

# Set here because every command and script imports the package before JAX.
if chosen := platforms(os.environ):
    os.environ[PLATFORMS] = chosen
