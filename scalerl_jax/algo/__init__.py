"""The mathematics: pure functions of arrays, one formula and one source each.

No function here reads a config, a mesh or a file, or takes a random key without need.
"""
