"""TPU slices shared by several jobs: who gets which chips; nothing here needs JAX."""
