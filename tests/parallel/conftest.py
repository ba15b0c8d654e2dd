"""Small models, and configurations of every strategy without Hydra."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.config.choices import Attention, Checkpointing, Compute, Generation, MasterWeights, Offload, Strategy
from tunebook.config.schema import FsdpConfig, ParallelismConfig, ZeroConfig

from ..config.conftest import open_config

CHOICES = {
    "ddp": ParallelismConfig(strategy=Strategy.ddp),
    "zero1": ZeroConfig(strategy=Strategy.zero1),
    "zero2": ZeroConfig(strategy=Strategy.zero2),
    "zero3": ZeroConfig(strategy=Strategy.zero3),
    "zero3_offload": ZeroConfig(strategy=Strategy.zero3, offload_optimizer=Offload.cpu, offload_parameters=Offload.cpu),
    "zero3_nvme": ZeroConfig(
        strategy=Strategy.zero3, offload_optimizer=Offload.nvme, offload_parameters=Offload.nvme, nvme_path="/mnt/nvme"
    ),
    "fsdp": FsdpConfig(strategy=Strategy.fsdp),
    "fsdp_grad_op": FsdpConfig(strategy=Strategy.fsdp_grad_op),
    "fsdp_offload": FsdpConfig(strategy=Strategy.fsdp, offload_parameters=Offload.cpu),
    "hsdp": FsdpConfig(strategy=Strategy.hsdp, shard_group_size=2),
}


@pytest.fixture
def qwen2(project_root) -> nn.Module:
    """The quickstart's architecture: 2 blocks of 443,328 parameters, attention 148,032 and MLP 294,912 of them."""
    architecture = AutoConfig.from_pretrained(project_root / "recipes" / "quickstart" / "model")
    return AutoModelForCausalLM.from_config(architecture)


@pytest.fixture
def config_on():
    """`config_on("fsdp", 4, ...)`: a resolved run of a strategy on so many GPUs, with settings of its group."""

    def resolved(choice, ranks=2, compute="bf16", master_weights="fp32", **settings):
        config = open_config()
        config.hardware.generation, config.hardware.gpus_per_node = Generation.hopper, ranks
        config.precision.compute, config.precision.master_weights = Compute[compute], MasterWeights[master_weights]
        config.attention.implementation = Attention.sdpa
        config.activation.checkpointing = Checkpointing.disabled
        config.model.compile_layers = False
        config.parallelism = replace(CHOICES[choice], **settings)
        return config

    return resolved
