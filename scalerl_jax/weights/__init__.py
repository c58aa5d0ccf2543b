"""The way of params from the learner to the generators."""
