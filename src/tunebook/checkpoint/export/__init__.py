"""`tunebook export`: one plain Hugging Face folder from any checkpoint of a run, on a CPU.

`run` is the command. `source` finds the weights, `stored_weights` and `zero_weights` read them, `model` makes what
belongs to them. `kinds` writes (`write`, `folder`, `card`) and compares.
"""
