"""ScaleRL in JAX: reinforcement learning of language models, made predictable."""

__version__ = "0.1.0"
