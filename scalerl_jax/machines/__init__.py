"""What a TPU slice is: its chips, hosts and processes; no JAX."""
