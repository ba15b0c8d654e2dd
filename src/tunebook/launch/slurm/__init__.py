"""Slurm: a job script that the user can read is rendered into the run folder and handed to sbatch.

On the user's machine: submit -> follow. In the job, on its first node: `commands.slurm_turn`, which does what `tunebook
train` does elsewhere once a run folder is set up, and starts the ranks through srun.
"""
