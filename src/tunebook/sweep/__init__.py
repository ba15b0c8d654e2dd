"""Sweeps: one run per combination of values, or per proposal of a search, and a ranked table of how they ended.

commands.sweep: options (checked) -> commands.sweep_planning: trials (a list, as Hydra's multirun combines it) or space
  (for a search), and commands.sweep_dividing (how many GPUs each gets) -> folder (sweep.json; whether an interrupted
  sweep resumes) -> study (Optuna's proposals) -> launching (one after the other, in parallel through joblib, or
  slurm_trials: as Slurm jobs) -> trial_process (one `tunebook train` each, on its share) -> results -> table

The values are written and combined as in Hydra's multirun, by Hydra's own parser and sweeper. Its launcher plugins are
not used: hydra-joblib-launcher ends its workers by force on Ctrl-C, so that no trial could save, and with
hydra-submitit-launcher one lost job ends the sweep; neither divides GPUs or goes on with an interrupted sweep. joblib
is used directly, and Slurm through `tunebook.slurm`, as by the launcher. hydra-optuna-sweeper needs optuna 2.10.1 and
cannot prune (hydra#1954), so a search asks and tells Optuna itself.
"""
