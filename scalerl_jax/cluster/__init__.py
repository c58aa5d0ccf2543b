"""One run over the processes of a Ray cluster: learner ranks and generator replicas."""
