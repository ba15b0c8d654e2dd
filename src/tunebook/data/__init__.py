"""Documents: where they come from, how they are written down, masked, cut, packed and drawn."""
