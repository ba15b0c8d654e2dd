"""Code generation tasks: humaneval, mbpp and 24 small problems of this book's own.

Evaluation has two steps. First, the harness only generates (`tasks/`, read by `code_task`): its own humaneval and mbpp
would execute programs next to the weights. Then `judging` builds programs from the answers, has the sandbox execute
them, and replaces the harness' scores by pass@k.
"""
