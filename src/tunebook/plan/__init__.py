"""What a run will do, worked out before it starts: the batch and, from it, steps and rows."""
