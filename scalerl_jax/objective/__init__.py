"""The objective: its terms, and what they need of a batch and of the learner."""
