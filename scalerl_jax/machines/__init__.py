"""Facts about TPU slices: chips, hosts and processes; nothing here imports JAX."""
