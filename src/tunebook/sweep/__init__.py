"""Sweeps: one run per combination of values, driven by Hydra's multirun, and a ranked table of how they ended.

run: trials (what will run) -> multirun (Hydra) -> trial_process (one `tunebook train` each) -> results -> table
"""
