"""Judges of answers: maths and code."""
