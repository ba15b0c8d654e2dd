"""A recipe is a claim, and evidence is a recorded run of it: written by `verify --record`, checked by `verify`."""
