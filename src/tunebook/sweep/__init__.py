"""Sweeps: one run per combination of values, or per proposal of a search, and a ranked table of the results.

commands.sweep: options (checked) -> commands.sweep_planning: trials (a list, combined like Hydra's multirun) or space
  (for a search), and commands.sweep_dividing (GPUs per trial) -> folder (sweep.json; whether an interrupted sweep
  resumes) -> study (Optuna's proposals) -> launching (one after the other, in parallel through joblib, or
  slurm_trials: as Slurm jobs) -> trial_process (one `tunebook train` each, on its share) -> results

Values are written and combined as in Hydra's multirun, by Hydra's own parser and sweeper. Hydra's launcher plugins are
not used. hydra-joblib-launcher kills its workers on Ctrl-C, so that no trial could save. With hydra-submitit-launcher
one lost job ends the sweep. Neither divides GPUs or resumes an interrupted sweep. joblib is used directly, and Slurm
through `tunebook.slurm`, as by the launcher. hydra-optuna-sweeper needs optuna 2.10.1 and cannot prune (hydra#1954), so
a search calls Optuna's ask and tell itself.
"""
