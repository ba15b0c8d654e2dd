"""`tunebook doctor`: look at this machine, its software and its links, and say what is wrong before a run does.

One module for each kind of thing that is looked at; each returns findings. What can hang, crash or take seconds to
import (NVML, torch, a tokenizer, NCCL) is asked in processes of their own, with a time limit: `probes`, `bandwidth`.
"""
