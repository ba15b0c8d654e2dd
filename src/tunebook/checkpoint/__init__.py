"""Checkpoints: which there are, and which one a run goes on from."""
