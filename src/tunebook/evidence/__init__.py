"""A recipe is a claim; evidence is a recorded run of it, written by `verify --record` and checked by `verify`."""
