"""Work out a run before it starts: its batch, steps, memory and speed."""
