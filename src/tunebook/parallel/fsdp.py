"""FSDP2 (`fully_shard`) through accelerate: the Trainer's `fsdp_config`, and settings that it does not have.

`fsdp` shards parameters, gradients and optimizer state; `fsdp_grad_op` keeps the gathered parameters after the forward
pass (less communication, more memory); `hsdp` shards inside a group of GPUs and replicates over groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebook.config.choices import Compute, MasterWeights, MixedPrecision, Offload, PeftMethod, Strategy
from tunebook.config.schema import FsdpConfig, RunConfig
from tunebook.facts.sharing import mixes_formats
from tunebook.facts.strategies import STRATEGIES

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy


def is_fsdp(strategy: Strategy) -> bool:
    """Whether a strategy is FSDP or HSDP."""
    return STRATEGIES[strategy].is_fsdp


def fsdp_of(config: RunConfig) -> FsdpConfig:
    """The settings of a run with an FSDP strategy."""
    assert isinstance(config.parallelism, FsdpConfig)
    return config.parallelism


def fsdp_arguments(config: RunConfig) -> dict[str, Any]:
    """The arguments of the Trainer for a resolved run with an FSDP strategy."""
    fsdp = fsdp_of(config)
    is_offloaded = fsdp.offload_parameters is not Offload.none  # parameters, gradients and the optimizer step
    arguments: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": not STRATEGIES[fsdp.strategy].keeps_gathered,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",  # of the classes of `unit_classes`
            "cpu_ram_efficient_loading": fsdp.cpu_ram_efficient_loading,
            "cpu_offload": is_offloaded,  # transformers silently drops `offload_params`, accelerate's own name
            "state_dict_type": "SHARDED_STATE_DICT",  # of checkpoints; the final model is whole
        },
        # Reduce gradients after every pass. By default they are reduced after the last accumulated pass, and until then
        # every GPU holds whole gradients.
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    }
    if is_offloaded:
        arguments["ddp_backend"] = "cuda:nccl,cpu:gloo"  # the norm of gradients in host memory is summed over gloo
    if sizes := hsdp_sizes(config):
        from accelerate import ParallelismConfig

        arguments["parallelism_config"] = ParallelismConfig(dp_replicate_size=sizes[0], dp_shard_size=sizes[1])
    return arguments


def hsdp_sizes(config: RunConfig) -> tuple[int, int] | None:
    """The number of model copies and the number of GPUs that shard each copy; None without HSDP."""
    if not STRATEGIES[config.parallelism.strategy].within_groups:
        return None
    group, hardware = fsdp_of(config).shard_group_size, config.hardware
    assert group is not None and hardware.gpus_per_node is not None
    return hardware.num_nodes * hardware.gpus_per_node // group, group


def autocast_dtype(config: RunConfig) -> torch.dtype | None:
    """The format of torch's autocast in the forward pass, which accelerate leaves out for FSDP2."""
    return _half(config) if uses_autocast(config) else None


def _half(config: RunConfig) -> torch.dtype:
    """The 16-bit format of a run; fp8 runs keep bf16 around the fp8 products."""
    import torch

    return torch.float16 if config.precision.compute is Compute.fp16 else torch.bfloat16


def uses_autocast(config: RunConfig) -> bool:
    """Whether the forward pass runs under torch's autocast."""
    fsdp = config.parallelism
    return isinstance(fsdp, FsdpConfig) and mixes_formats(config) and fsdp.mixed_precision is MixedPrecision.autocast


def mixed_precision_policy(config: RunConfig) -> MixedPrecisionPolicy | None:
    """FSDP's casts for a run that computes in 16 bits; None keeps everything in the format of the weights.

    The gathered weights are 16-bit and gradients are summed over the ranks in fp32. accelerate would use 16 bits for
    both, and for the model's output too. fp16 ends at 65,504, so it holds neither a sum of scaled gradients nor the
    gradient of a loss scaled by 65,536, the initial scale. With autocast the activations between layers are fp32 as
    well. fp32 adapters over bf16 weights are gathered in bf16, like the weights.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    is_bf16 = config.precision.master_weights is MasterWeights.bf16
    has_mixed_adapters = is_bf16 and config.peft.method is not PeftMethod.full
    if not mixes_formats(config) and not has_mixed_adapters:
        return None
    return MixedPrecisionPolicy(
        param_dtype=_half(config),
        reduce_dtype=torch.float32,
        output_dtype=torch.float32 if uses_autocast(config) else None,
        cast_forward_inputs=not uses_autocast(config),
    )
