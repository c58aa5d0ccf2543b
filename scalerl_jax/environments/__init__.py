"""Verdicts: the processes that give them, and the sandbox of programs."""
