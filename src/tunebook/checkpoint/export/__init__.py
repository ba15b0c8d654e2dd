"""`tunebook export`: one plain Hugging Face folder from any checkpoint of a run, on a CPU.

`run` is the command. `source` finds the weights and `weights` reads them. `model` and `adapter` build what is written,
`write` saves it, loads it again and compares it. `card` describes it.
"""
