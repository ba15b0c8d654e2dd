"""Weights, gradients and optimizer state of one rank, as the strategy divides and offloads them.

Source: the ZeRO paper (Rajbhandari et al. 2020, figure 1) for what each stage divides. DeepSpeed 0.19.8 also holds a
master copy of each rank's share, even if the weights are already in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tunebook.config.choices import Compute, MasterWeights, MixedPrecision, PeftMethod
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig, world_size
from tunebook.facts.optimizers import OPTIMIZERS
from tunebook.facts.sharing import is_cast_by_deepspeed, offloaded_states
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import count_parameters, trained_sizes

# transformers 5.23 requests 32-bit moments from bitsandbytes for every embedding (trainer.py, create_optimizer). It
# identifies the embedding by the parameter itself, which does not match DeepSpeed's flat copies.
_EMBEDDING_MOMENT_BYTES = 8
_FP8_BYTES = 2  # of a frozen weight: one copy for the forward pass and one for the backward pass
# 4 bits, plus a scale per block of 64 that is itself kept in 8 bits (double quantization): 4.127 bits in all. Source:
# Dettmers et al. 2023, QLoRA, section 3.
FOUR_BIT_BYTES = 4.127 / 8
_SUB_GROUP = 1_000_000_000  # parameters of a rank's share that ZeRO-3 updates at a time by default
_FP64 = 8  # bytes


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of one rank."""

    weights: float
    gradients: float  # of one pass, after its backward pass
    optimizer: float
    bytes_per_gradient: int  # bytes of one gradient


@dataclass(frozen=True, kw_only=True)
class ShardCounts:
    """Number of ranks that each part is divided among."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1


def state_bytes(config: RunConfig, facts: ModelFacts) -> States:
    """The model's states on one rank's device, without what is offloaded.

    DeepSpeed moves gradients to the device of the optimizer step through buckets, which `plan.memory.rows` counts.
    """
    states, offloaded = state_bytes_with_offloaded(config, facts), offloaded_states(config)
    if "offload_parameters" in offloaded:
        states = replace(states, weights=0.0)
    if "offload_optimizer" in offloaded or (offloaded and isinstance(config.parallelism, FsdpConfig)):
        return replace(states, gradients=0.0, optimizer=0.0)
    return replace(states, optimizer=states.optimizer - paged_bytes(config, facts))


def reduced_gradient_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of the gradient buffer that DeepSpeed's stages 1 and 2 allocate to reduce one rank's gradients.

    The buffer holds the full gradient of every parameter that the rank owns a piece of (0.19.8, stage_1_and_2.py,
    copy_grads_in_partition). Stage 1 allocates it once a step, when all full gradients exist.
    """
    ranks = world_size(config)
    if not strategy_facts(config).keeps_whole_weights or not state_bytes(config, facts).gradients:
        return 0.0
    element, share = bytes_per_trained_weight(config), count_parameters(config, facts).trained / ranks
    return element * max(share, *(held.whole for held in _owned_by_rank(config, facts)))


def step_gradient_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of gradients that DeepSpeed holds during the optimizer step; 0 if the step is on the host.

    Stages 1 and 2 flatten a rank's gradients and cast 16-bit ones to fp32, while all reduced gradients still exist.
    Before that, each gradient is cast to fp64 for the norm. Stage 3 does so for a billion parameters at a time, unless
    another size is configured (0.19.8, stage_1_and_2.py and stage3.py, step).
    """
    settings = config.parallelism
    if not isinstance(settings, ZeroConfig) or "offload_optimizer" in offloaded_states(config):
        return 0.0
    ranks, element = world_size(config), bytes_per_trained_weight(config)
    share, cast = count_parameters(config, facts).trained / ranks, 4 if element == 2 else 0
    if strategy_facts(config).is_zero3:
        at_once, largest = min(share, settings.sub_group_size or _SUB_GROUP), max(trained_sizes(config, facts)) / ranks
        return element * share + max(at_once * (element + cast), _FP64 * largest)
    return max(
        element * max(share, held.whole) + max(share * (element + cast), _FP64 * held.largest)
        for held in _owned_by_rank(config, facts)
    )


@dataclass(frozen=True, kw_only=True)
class _OwnedParameters:
    """Sizes of the parameters that a rank of DeepSpeed's stages 1 and 2 owns a piece of."""

    whole: int  # all of those parameters, in full
    largest: float  # the largest piece


def _owned_by_rank(config: RunConfig, facts: ModelFacts) -> list[_OwnedParameters]:
    """Sizes by rank: DeepSpeed concatenates all large trained parameters and cuts them into equal shares."""
    ranks, sizes = world_size(config), trained_sizes(config, facts)
    is_dealt = getattr(config.parallelism, "round_robin_gradients", None)
    ordered = [size for rank in range(ranks) for size in sizes[rank::ranks]] if is_dealt else sizes
    share, start, whole, largest = sum(ordered) / ranks, 0, [0] * ranks, [0.0] * ranks
    for size in ordered:
        for rank in range(int(start // share), min(ranks - 1, int((start + size - 1) // share)) + 1):
            whole[rank] += size
            piece = min(start + size, (rank + 1) * share) - max(start, rank * share)
            largest[rank] = max(largest[rank], piece)
        start += size
    return [_OwnedParameters(whole=whole[rank], largest=largest[rank]) for rank in range(ranks)]


def state_bytes_with_offloaded(config: RunConfig, facts: ModelFacts) -> States:
    """One rank's share of the model's states, on the device or offloaded."""
    parameters, shares, element = (
        count_parameters(config, facts),
        shard_counts(config),
        bytes_per_trained_weight(config),
    )
    return States(
        weights=(parameters.trained * element + _frozen_bytes(config, facts)) / shares.weights,
        gradients=parameters.trained * element / shares.gradients,
        optimizer=(_moments_bytes(config, facts) + parameters.trained * _master_bytes_per_weight(config))
        / shares.optimizer,
        bytes_per_gradient=element,
    )


def paged_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """One rank's paged moments, which the driver moves between GPU and host. A master copy is not paged."""
    if not OPTIMIZERS[config.optimizer.name].is_paged:
        return 0.0
    return _moments_bytes(config, facts) / shard_counts(config).optimizer


def _frozen_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of the frozen base model under adapters.

    Only linear layers are quantized to 4 bits or fp8: not embeddings, head and stacked experts.
    """
    parameters, element = count_parameters(config, facts), bytes_per_weight(config)
    if config.peft.method is PeftMethod.full:
        return float(parameters.frozen * element)
    in_linear: float = _FP8_BYTES if config.precision.compute is Compute.fp8 else element
    if config.peft.method is PeftMethod.qlora:
        in_linear = FOUR_BIT_BYTES
    return float(parameters.linear * in_linear + (parameters.frozen - parameters.linear) * element)


def bytes_per_weight(config: RunConfig) -> int:
    """Bytes of one weight of the model; DeepSpeed's own mixed precision casts weights to 16 bits."""
    return 2 if is_cast_by_deepspeed(config) or config.precision.master_weights is MasterWeights.bf16 else 4


def bytes_per_trained_weight(config: RunConfig) -> int:
    """Bytes of one trained weight. Adapters over bf16 weights are in fp32 unless DeepSpeed casts them."""
    is_adapter = config.peft.method is not PeftMethod.full
    return 4 if is_adapter and not isinstance(config.parallelism, ZeroConfig) else bytes_per_weight(config)


def bytes_per_compute_value(config: RunConfig) -> int:
    """Bytes of one number in a matrix product."""
    return 4 if config.precision.compute is Compute.fp32 else 2


def offloads_parameters(config: RunConfig) -> bool:
    """Whether the model's parameters are offloaded to the host or its disks."""
    return "offload_parameters" in offloaded_states(config)


def _moments_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of all optimizer moments, before they are divided among ranks.

    8-bit moments were measured with Phi-4's 4 layers on two H200 with DDP.
    """
    parameters, element = count_parameters(config, facts), _moment_bytes_per_weight(config)
    optimizer = OPTIMIZERS[config.optimizer.name]
    if not optimizer.keeps_embeddings_in_fp32 or isinstance(config.parallelism, ZeroConfig):
        matrices = parameters.trained - parameters.trained_embeddings
        matrices -= 0 if facts.tie_word_embeddings else parameters.trained_head
        return parameters.trained * element - matrices * element * (1 - optimizer.matrix_moments / 2)
    embeddings = parameters.trained_embeddings
    return float((parameters.trained - embeddings) * element + embeddings * _EMBEDDING_MOMENT_BYTES)


def _moment_bytes_per_weight(config: RunConfig) -> float:
    """Bytes of two moments per trained parameter.

    torch's moments have the format of the weights; bitsandbytes' 32-bit moments are always fp32 (0.50,
    optim/optimizer.py).
    """
    is_bf16 = bytes_per_trained_weight(config) == 2 and not isinstance(config.parallelism, ZeroConfig)
    state_bytes = OPTIMIZERS[config.optimizer.name].state_bytes
    return state_bytes if state_bytes is not None else 4 if is_bf16 else 8


def _master_bytes_per_weight(config: RunConfig) -> int:
    """Bytes of DeepSpeed's fp32 copy per trained parameter.

    ZeRO-3 means to update fp32 weights on the GPU in place. It decides by comparing a device with a device name, which
    are never equal, and so clones the weights (0.19.8, `stage3.py`, `_create_fp32_partitions`; a test checks it).
    """
    return 4 if isinstance(config.parallelism, ZeroConfig) else 0


def shard_counts(config: RunConfig) -> ShardCounts:
    """How the strategy divides the states among ranks."""
    facts, ranks = strategy_facts(config), world_size(config)
    if facts.within_groups:
        named = config.parallelism.shard_group_size if isinstance(config.parallelism, FsdpConfig) else None
        ranks = max(1, named or config.hardware.gpus_per_node or 1)
    return ShardCounts(  # states are divided even if weights stay gathered for a pass
        weights=ranks if facts.divides_weights else 1,
        gradients=ranks if facts.divides_gradients else 1,
        optimizer=ranks if facts.divides_optimizer else 1,
    )


def bytes_per_hidden_value(config: RunConfig) -> int:
    """Bytes of one number between the layers: the format of the weights that a layer computes with."""
    settings = config.parallelism
    is_cast = isinstance(settings, FsdpConfig) and settings.mixed_precision is MixedPrecision.cast
    return 2 if is_cast and config.precision.compute is not Compute.fp32 else bytes_per_weight(config)
