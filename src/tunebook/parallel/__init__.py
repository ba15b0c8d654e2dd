"""Parallelism: pure functions from a resolved `RunConfig` to the settings of accelerate, DeepSpeed and FSDP."""
