"""What the tasks of an evaluation need that may not be on this machine: data sets, nltk data, Python packages.

leaf_tasks (a name to single tasks) -> data_sets, modules, nltk_data (what each needs, and whether it is here) ->
check (all that is missing, at once, before a model is loaded) and fetch (download it for a later evaluation).
"""
