"""Launching: start the ranks of a run on one node or several, follow them, and report why they ended.

What starts the ranks differs by launcher (`commands`, `slurm`, `ray`). On one node `tunebook.supervise` follows them.
On several, `nodes` is the launcher's side and `node` the side of each node; they meet in a `rendezvous`. Each of
several ranks is a `rank`, which runs a `first_collective` with the others before it trains.
"""
