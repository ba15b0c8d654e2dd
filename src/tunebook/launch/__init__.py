"""Launching: the run folder is set up, the command is built by a pure function, printed, and run."""
