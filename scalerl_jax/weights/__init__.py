"""Weight sync: send params from the learner to the generators."""
