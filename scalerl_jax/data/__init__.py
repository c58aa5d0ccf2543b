"""Prompts: the tasks they come from, their splits, their order."""
