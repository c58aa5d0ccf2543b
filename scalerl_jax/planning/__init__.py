"""Seconds and bytes of a step of a run on chips, and the best split of them."""
