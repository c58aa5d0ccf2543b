"""Pass rates of any checkpoint, by a command.

The commands are `python -m scalerl_jax.evaluate` and `python -m scalerl_jax.data
difficulty`.  What a run does of it, on held-out prompts, is `generation.evaluation`.
"""
