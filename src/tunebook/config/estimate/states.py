"""Weights, gradients and optimizer state of one rank, as the strategy divides and offloads them.

Source: the ZeRO paper (Rajbhandari et al. 2020, figure 1) for what each stage divides; DeepSpeed 0.19.8 for what it
holds besides: a master copy of each rank's share, also where the weights are fp32 already.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunebook.config.choices import Compute, MasterWeights, MixedPrecision, Offload, OptimizerName, PeftMethod, Strategy
from tunebook.config.estimate.parameters import count_parameters
from tunebook.config.schema import FsdpConfig, ModelFacts, RunConfig, ZeroConfig

_EIGHT_BIT = (OptimizerName.adamw_8bit, OptimizerName.paged_adamw_8bit)
_PAGED = (OptimizerName.paged_adamw_32bit, OptimizerName.paged_adamw_8bit)
_FOUR_BIT_BYTES = 0.55  # 4 bits and the scale of each block


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    gradient_element: int  # bytes of one gradient


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Among how many ranks each part is divided."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1


def state_bytes(config: RunConfig, facts: ModelFacts) -> States:
    """The model's states on one rank's device; what is offloaded is not there."""
    parameters, shares, element = count_parameters(config, facts), divided_among(config), weight_element(config)
    frozen = parameters.frozen * (_FOUR_BIT_BYTES if config.peft.method is PeftMethod.qlora else element)
    weights = (parameters.trained * element + frozen) / shares.weights
    gradients = parameters.trained * element / shares.gradients
    optimizer = parameters.trained * _optimizer_element(config) / shares.optimizer
    settings = config.parallelism
    if config.optimizer.name in _PAGED:
        optimizer = 0.0
    if isinstance(settings, ZeroConfig) and settings.offload_optimizer is not Offload.none:
        optimizer = 0.0
    if isinstance(settings, ZeroConfig) and settings.offload_parameters is not Offload.none:
        weights = 0.0
    if isinstance(settings, FsdpConfig) and settings.offload_parameters is not Offload.none:
        weights = gradients = optimizer = 0.0
    return States(weights=weights, gradients=gradients, optimizer=optimizer, gradient_element=element)


def weight_element(config: RunConfig) -> int:
    """Bytes of a weight as the model holds it: DeepSpeed's own mixed precision casts it to bf16."""
    is_cast = isinstance(config.parallelism, ZeroConfig) and config.parallelism.mixed_precision is MixedPrecision.cast
    is_half = config.precision.compute is not Compute.fp32 and is_cast
    return 2 if is_half or config.precision.master_weights is MasterWeights.bf16 else 4


def _optimizer_element(config: RunConfig) -> float:
    """Bytes of optimizer state per trained parameter: two moments, and under ZeRO the master copy."""
    is_bf16 = config.precision.master_weights is MasterWeights.bf16
    is_zero = isinstance(config.parallelism, ZeroConfig)
    moments = 2 if config.optimizer.name in _EIGHT_BIT else 4 if is_bf16 and not is_zero else 8
    return moments + (4 if is_zero else 0)


def divided_among(config: RunConfig) -> Shares:
    """How the strategy divides the states."""
    gpus_per_node = max(1, config.hardware.gpus_per_node or 1)
    world = max(1, config.hardware.num_nodes) * gpus_per_node
    strategy = config.parallelism.strategy
    if strategy is Strategy.zero1:
        return Shares(optimizer=world)
    if strategy in (Strategy.zero2, Strategy.fsdp_grad_op):
        return Shares(gradients=world, optimizer=world)
    if strategy in (Strategy.zero3, Strategy.fsdp):
        return Shares(weights=world, gradients=world, optimizer=world)
    if strategy is Strategy.hsdp:
        named = config.parallelism.shard_group_size if isinstance(config.parallelism, FsdpConfig) else None
        group = max(1, named or gpus_per_node)
        return Shares(weights=group, gradients=group, optimizer=group)
    return Shares()
