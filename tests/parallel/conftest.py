"""Small models."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.config.choices import Generation, Strategy
from tunebook.config.compose import compose


@pytest.fixture
def qwen2(project_root) -> nn.Module:
    """The quickstart's architecture: 2 blocks of 443,328 parameters, attention 148,032 and MLP 294,912 of them."""
    architecture = AutoConfig.from_pretrained(project_root / "recipes" / "quickstart" / "model")
    return AutoModelForCausalLM.from_config(architecture)


@pytest.fixture
def config_on():
    """`config_on("fsdp", 4, ...)`: a resolved run of a strategy on so many GPUs."""

    def resolved(choice: str, ranks: int, *overrides: str):
        words = [f"parallelism={choice}", f"hardware.gpus_per_node={ranks}", "precision=bf16"]
        words += ["precision.master_weights=fp32", *overrides]
        config = compose("qwen3b_zero2", words).config
        config.hardware.generation = Generation.hopper
        if config.parallelism.strategy is Strategy.hsdp:
            config.parallelism.shard_group_size = config.parallelism.shard_group_size or ranks
        return config

    return resolved
