"""From a laptop to machines that train, and back with the curve.

Commands of Google's own clients are built here, printed or run; what is there is asked
of them and never guessed.  Nothing here needs JAX or a device.
"""
