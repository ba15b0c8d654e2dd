"""Time and tokens per second of a run, estimated before it starts."""
