"""Create machines for a run, start the run on them, fetch its files and clean up.

This package builds the commands of Google's own clients and prints or runs them; it
reads the state of machines from them.  Nothing here needs JAX or a device.
"""
