"""Launching: start the ranks of a run on one node or several, follow them, and report why they ended.

torchrun and Ray Train join the ranks, see failures and end the others. `commands` builds what starts them, `supervise`
runs it and forwards stop requests, `local` is the part of each node of several, `rank` a rank of several.
"""
