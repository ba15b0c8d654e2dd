"""`tunebook doctor`: check this machine, its software and its links before a run fails on them."""
