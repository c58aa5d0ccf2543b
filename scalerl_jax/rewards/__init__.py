"""Verifiers: what decides that a completion is right."""
