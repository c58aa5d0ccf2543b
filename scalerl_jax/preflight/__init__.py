"""Whether a config fits a TPU topology, found by compiling for it without one."""
