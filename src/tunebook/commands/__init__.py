"""The commands that combine several packages: plan, train, evaluate, sweep, compare.

These packages do not import each other; only the code here, below the command line, imports all of them.
"""
