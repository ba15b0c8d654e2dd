"""A first, rough answer to "does it fit without activation checkpointing?", from parameter counts alone.

The memory plan answers the same question part by part; until a configuration has been planned, `auto` uses this. It is
called *estimated* wherever it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunebook.config.choices import Compute, MasterWeights, Offload, OptimizerName, PeftMethod, Strategy
from tunebook.config.schema import FsdpConfig, ModelFacts, RunConfig, ZeroConfig

GIB = 2**30
# What the model may fill of the memory: the rest is the CUDA context, communication buffers and unusable pieces.
USABLE_SHARE = 0.8
_EIGHT_BIT = (OptimizerName.adamw_8bit, OptimizerName.paged_adamw_8bit)
_PAGED = (OptimizerName.paged_adamw_32bit, OptimizerName.paged_adamw_8bit)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated memory of one rank in GiB, with every activation kept."""

    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    gathered_gib: float  # what is whole at a time of a model that is divided or elsewhere
    activations_gib: float

    @property
    def states_gib(self) -> float:
        """Everything but activations."""
        return self.weights_gib + self.gradients_gib + self.optimizer_gib + self.gathered_gib

    @property
    def total_gib(self) -> float:
        """All of it."""
        return self.states_gib + self.activations_gib


def estimate_memory(config: RunConfig, facts: ModelFacts) -> Estimate:
    """Estimate one rank's memory for a resolved machine, precision, packing and micro batch."""
    weights, gradients, optimizer = _states_bytes(config, facts)
    return Estimate(
        weights_gib=weights / GIB,
        gradients_gib=gradients / GIB,
        optimizer_gib=optimizer / GIB,
        gathered_gib=_gathered_bytes(config, facts) / GIB,
        activations_gib=_activation_bytes(config, facts) / GIB,
    )


def _states_bytes(config: RunConfig, facts: ModelFacts) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state: 16 bytes per trained parameter, a weight, a gradient and two moments in
    fp32, each divided among the ranks that share it."""
    weight = 2 if config.precision.master_weights is MasterWeights.bf16 else 4
    moments = 2 if config.optimizer.name in _EIGHT_BIT else 2 * weight
    trained, frozen = _parameters(config, facts)
    frozen_bytes = {PeftMethod.qlora: 0.55}.get(config.peft.method, float(weight))  # 4 bits and the scale of each block
    shares = _shares(config)
    optimizer = 0.0 if config.optimizer.name in _PAGED else trained * moments / shares.optimizer
    gradients = trained * weight / shares.gradients
    weights = (trained * weight + frozen * frozen_bytes) / shares.weights
    settings = config.parallelism
    if isinstance(settings, ZeroConfig) and settings.offload_optimizer is not Offload.none:
        optimizer = 0.0
    if isinstance(settings, ZeroConfig) and settings.offload_parameters is not Offload.none:
        weights = 0.0
    if isinstance(settings, FsdpConfig) and settings.offload_parameters is not Offload.none:
        weights = gradients = optimizer = 0.0
    return weights, gradients, optimizer


def _gathered_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What a rank holds whole of a sharded or offloaded model: the embeddings and two layers, with their gradients."""
    settings = config.parallelism
    is_away = isinstance(settings, ZeroConfig | FsdpConfig) and settings.offload_parameters is not Offload.none
    if _shares(config).weights == 1 and not is_away:
        return 0.0
    embeddings = facts.vocab_size * facts.hidden_size * (1 if facts.tie_word_embeddings else 2)
    layer = max(0, facts.num_parameters - embeddings) / max(1, facts.num_layers)
    element = 4 if config.precision.compute is Compute.fp32 else 2
    return 2 * element * (embeddings + 2 * layer)


def _parameters(config: RunConfig, facts: ModelFacts) -> tuple[int, int]:
    """How many parameters are trained and how many are frozen."""
    if config.peft.method is PeftMethod.full:
        return facts.num_parameters, 0
    # an adapter on each of the seven linear layers: rank x (inputs + outputs)
    sizes = 8 * facts.hidden_size + 3 * (facts.hidden_size + facts.intermediate_size)
    return config.peft.rank * sizes * facts.num_layers, facts.num_parameters


@dataclass(frozen=True, kw_only=True)
class _Shares:
    """Among how many ranks each part is divided."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1


def _shares(config: RunConfig) -> _Shares:
    gpus_per_node = max(1, config.hardware.gpus_per_node or 1)
    world = max(1, config.hardware.num_nodes) * gpus_per_node
    strategy = config.parallelism.strategy
    if strategy is Strategy.zero1:
        return _Shares(optimizer=world)
    if strategy in (Strategy.zero2, Strategy.fsdp_grad_op):
        return _Shares(gradients=world, optimizer=world)
    if strategy in (Strategy.zero3, Strategy.fsdp):
        return _Shares(weights=world, gradients=world, optimizer=world)
    if strategy is Strategy.hsdp:
        named = config.parallelism.shard_group_size if isinstance(config.parallelism, FsdpConfig) else None
        group = max(1, named or gpus_per_node)
        return _Shares(weights=group, gradients=group, optimizer=group)
    return _Shares()


def _activation_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What one micro batch keeps per layer: ten tensors of hidden size and four of the feed-forward's, in the number
    format of the computation, and the residual stream and its norms in fp32."""
    element = 4 if config.precision.compute is Compute.fp32 else 2
    row = config.packing.row_length or config.training.max_length
    tokens = max(1, config.training.micro_batch_size or 1) * row
    per_token = element * (10 * facts.hidden_size + 4 * facts.intermediate_size) + 16 * facts.hidden_size
    return float(tokens * facts.num_layers * per_token)
