"""What is known of GPUs, kernels and models in advance, as tables."""
