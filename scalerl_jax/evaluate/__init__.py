"""Pass rates: of a run's held-out prompts, and of any checkpoint by a command.

A run uses `evaluation` and `metrics`; the others are the commands `python -m
scalerl_jax.evaluate` and `python -m scalerl_jax.data difficulty`.
"""
