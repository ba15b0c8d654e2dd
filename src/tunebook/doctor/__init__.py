"""`tunebook doctor`: check this machine, its software and its links before a run fails on them.

One module per kind of check; each returns findings. Checks that can hang, crash or take seconds to import (NVML, torch,
a tokenizer, NCCL) run in separate processes with a time limit: `probes`, `bandwidth`.
"""
