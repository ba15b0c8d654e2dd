"""Slurm: write a readable job script into the run folder and submit it with sbatch.

On the user's machine: submit -> follow. In the job, on its first node: `commands.slurm_turn`. It does what `tunebook
train` does elsewhere after the run folder is set up, and starts the ranks through srun.
"""
