"""Pass rate on fixed held-out prompts at a pinned version."""
