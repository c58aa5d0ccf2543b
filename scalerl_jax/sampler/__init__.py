"""Generation: an engine with JetStream's verbs, its scheduler, and a slow oracle."""
