"""Tables of known facts about GPUs, kernels and models."""
