"""The mathematics: pure functions of arrays, one formula and one source each.

Nothing here knows a config, a mesh, a file or a random key it does not use.
"""
