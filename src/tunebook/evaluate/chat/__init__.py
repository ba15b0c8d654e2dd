"""`tunebook chat`: talk to a run or a model in the terminal, with the run's own tokenizer, template and system prompt.

`terminal` reads questions and shows answers, `session` keeps the history, `model` loads the model and generates.
"""
