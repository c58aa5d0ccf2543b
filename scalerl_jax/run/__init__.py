"""A run's directory, and the files that it keeps there."""
