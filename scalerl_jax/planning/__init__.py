"""Forecast the seconds and bytes of a run's step on chips, and choose their split."""
