"""The tasks that have a model write programs: humaneval, mbpp and 24 small problems of this book's own.

Two steps. The harness only generates (`tasks/`, read by `code_task`): its own humaneval and mbpp would execute what a
model wrote beside the weights. Afterwards `judging` makes programs of the answers (`programs`, `samples`), has the
sandbox execute them, and puts pass@k where the harness has its scores. `checks` refuses, before anything is generated,
what could not be executed.
"""
