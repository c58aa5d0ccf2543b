"""The learner: log-probabilities, the train step, and its state on disk."""
