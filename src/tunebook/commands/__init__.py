"""What the commands do that compose several wings: plan, train, evaluate, sweep, compare.

No wing imports another; they meet here, below the command line.
"""
