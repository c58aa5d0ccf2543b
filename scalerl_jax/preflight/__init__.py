"""Compile a config for a TPU topology that is not here, and say whether it fits."""
