"""Launching: start the ranks of a run on one node or several, follow them, and report why they ended.

The launchers differ in what starts the ranks (`commands`, `slurm`, `ray`). On one node `supervise` follows them. On
several nodes, `nodes` is the launcher's side and `node` the side of each node; they join through a `rendezvous`. With
several ranks, each is a `rank`, which runs a `first_collective` with the others before it trains.
"""
