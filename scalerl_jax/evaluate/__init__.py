"""Commands that measure pass rates of any checkpoint.

They are `scalerl evaluate` and `scalerl data difficulty`.  A run's own evaluation, on
held-out prompts, is `generation.evaluation`.
"""
