"""Ways of training, a file each: a trainer of TRL with our batches, checkpoints and records, and its loss."""
