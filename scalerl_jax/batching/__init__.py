"""Batches of optimizer steps from groups: filters, weights, packed rows, windows."""
