"""Launching: the run folder is set up, the command is built by a pure function, printed, and run.

`job` does all of it; `attempt` is one attempt, on the first node. What starts the ranks differs by launcher
(`commands`, `slurm`, `ray`). On one node `local` follows them. On several, `nodes` is the launcher's side and `node`
the side of each node; they meet in a `rendezvous`. Each of several ranks is a `rank`, which meets the others in a
`first_collective` before it trains.
"""
