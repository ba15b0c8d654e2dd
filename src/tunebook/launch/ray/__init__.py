"""Ray: `python -m tunebook.launch.ray` starts the ranks through Ray Train's TorchTrainer, one worker each.

check (before anything is prepared) -> __main__ (the driver: cluster, trainer) -> worker (what Ray runs once per rank).
"""
