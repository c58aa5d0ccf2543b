"""Compile a config for a TPU topology without TPUs, and report whether it fits."""
