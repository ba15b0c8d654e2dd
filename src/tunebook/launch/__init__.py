"""Launching: the run folder is set up, the command is built by a pure function, printed, and run.

`job` does all of it; `attempt` is one turn of it, on the first node. What starts the ranks differs by launcher
(`commands`, `slurm`, `ray`); what follows them does not: on one node `local`, on several `nodes` with its `roll_call`,
which a `node` on each answers. Every rank of several is a `rank`, which first has a `meeting` with the others.
"""
