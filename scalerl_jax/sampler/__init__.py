"""Generation: an engine with JetStream's verbs, a scheduler, a slow reference."""
