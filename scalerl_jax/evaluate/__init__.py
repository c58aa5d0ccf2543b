"""Pass rates of any checkpoint, by a command.

The commands are `scalerl evaluate` and `scalerl data difficulty`.  What a run does of
it, on held-out prompts, is `generation.evaluation`.
"""
