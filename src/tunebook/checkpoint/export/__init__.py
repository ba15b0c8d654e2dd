"""`tunebook export`: one plain Hugging Face folder from any checkpoint of a run, on a CPU.

`run` is the command: it chooses the weights. `weights` reads them, `model` builds what is exported, `write` saves it,
loads it again and compares it. `card` describes it.
"""
