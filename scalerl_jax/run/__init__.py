"""A run's directory and the files in it."""
