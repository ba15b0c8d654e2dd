"""Sweeps: one run per combination of values, or per proposal of a search, and a ranked table of the results.

space (what the overrides list or search) -> study (Optuna's storage in the sweep's folder: which trials are left) ->
trials (each a `tunebook train`) or slurm (the same as tasks of a job array) -> table

The values are read by Hydra's own parser. Its launchers and sweepers are not used: hydra-optuna-sweeper needs optuna
2.10.1 and cannot prune (hydra#1954), and hydra-joblib-launcher kills its workers on Ctrl-C, so that no trial could
save.
"""
