"""The policy network: pure functions over a parameter tree, weights in and out."""
