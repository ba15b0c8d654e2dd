"""Changes that make a run fit."""
