"""Measured bandwidth between the GPUs of this machine: a short all-reduce and all-gather in ranks of their own."""
