"""Estimate the time and tokens per second of a run before it starts."""
