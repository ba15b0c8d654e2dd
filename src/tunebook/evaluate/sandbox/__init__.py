"""Programs that a model wrote are executed here, or not at all: `start` finds a sandbox, and `run` executes in it."""
