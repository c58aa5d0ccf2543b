"""Which devices do what: meshes for the learner, a share for the sampler."""
