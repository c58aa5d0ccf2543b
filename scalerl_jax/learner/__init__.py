"""What happens on the learner: log-probabilities, the step, its state on disk."""
