"""The code that a rank runs: model, data and TRL's trainer, from the frozen `run.yaml` in the run folder."""
