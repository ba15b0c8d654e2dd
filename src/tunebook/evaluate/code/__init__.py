"""The tasks that have a model write programs: humaneval, mbpp and 24 small problems of this book's own.

Two steps. First the harness only generates (`tasks/`, read by `code_task`): its own humaneval and mbpp would execute
programs next to the weights. Then `judging` makes programs of the answers, lets the sandbox execute them and replaces
the harness' scores by pass@k. `checks` refuses what could not be executed before anything is generated.
"""
