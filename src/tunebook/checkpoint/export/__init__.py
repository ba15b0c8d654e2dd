"""`tunebook export`: one plain Hugging Face folder from any checkpoint of a run, on a CPU.

What is stored where: `source`, `formats`. Reading each form: `stored_weights`, `zero_weights`, `fsdp_weights`,
`adapter`. What belongs beside the weights: `model`, `card`. Writing, looking and giving away: `write`, `folder`,
`check`, `push`. `run` puts them together, `command` is the terminal's side.
"""
