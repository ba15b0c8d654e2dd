"""Checkpoints: save, verify, retain and export them, and choose the one that a run resumes from."""
