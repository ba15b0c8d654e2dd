"""Weights, gradients and optimizer state of one rank, as the strategy divides and offloads them.

Source: the ZeRO paper (Rajbhandari et al. 2020, figure 1) for what each stage divides; DeepSpeed 0.19.8 for what it
holds besides: a master copy of each rank's share, also where the weights are fp32 already.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tunebook.config.choices import Compute, MasterWeights, Offload, PeftMethod
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig
from tunebook.facts.optimizers import OPTIMIZERS
from tunebook.facts.sharing import is_cast_by_deepspeed
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import count_parameters, trained_sizes

# transformers 5.23 asks bitsandbytes for moments in 32 bits of every embedding (trainer.py, create_optimizer), which it
# finds by the parameter itself: not by DeepSpeed's flat copies.
_MOMENTS_OF_EMBEDDINGS = 8
# 4 bits, and for each block of 64 a scale that is itself kept in 8 bits (double quantisation): 4.127 bits in all.
# Source: Dettmers et al. 2023, QLoRA, section 3.
FOUR_BIT_BYTES = 4.127 / 8
_SUB_GROUP = 1_000_000_000  # parameters that ZeRO-3 steps at a time by default, of a rank's share
_FP64 = 8  # bytes


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of one rank."""

    weights: float
    gradients: float  # of one pass, when its backward pass has ended
    optimizer: float
    gradient_element: int  # bytes of one gradient


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Among how many ranks each part is divided."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1


def state_bytes(config: RunConfig, facts: ModelFacts) -> States:
    """The model's states on one rank's device; what is offloaded is not there.

    DeepSpeed moves gradients to where the step is, through the buckets that `bucket_bytes` counts.
    """
    states, settings = states_anywhere(config, facts), config.parallelism
    weights, gradients, optimizer = states.weights, states.gradients, states.optimizer
    if OPTIMIZERS[config.optimizer.name].is_paged:
        optimizer -= paged_bytes(config, facts)
    if isinstance(settings, ZeroConfig) and settings.offload_optimizer is not Offload.none:
        gradients = optimizer = 0.0
    if isinstance(settings, ZeroConfig) and settings.offload_parameters is not Offload.none:
        weights = 0.0
    if isinstance(settings, FsdpConfig) and settings.offload_parameters is not Offload.none:
        weights = gradients = optimizer = 0.0
    return replace(states, weights=weights, gradients=gradients, optimizer=optimizer)


def reduced_gradient_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What DeepSpeed's stages 1 and 2 make room for when gradients are sent to the ranks: all that a rank will get.

    That is of every parameter whole of which a rank has a piece (0.19.8, stage_1_and_2.py, copy_grads_in_partition).
    Where parameters are dealt out in turn, both the embeddings and the head of 3 layers of Qwen2.5-7B were among them
    on one of two H200, 5.2 GiB for a share of 3.3. Stage 1 does so once a step, when all gradients are there whole.
    """
    ranks = num_ranks(config)
    if not strategy_facts(config).keeps_whole_weights or not state_bytes(config, facts).gradients:
        return 0.0
    element, share = trained_element(config), count_parameters(config, facts).trained / ranks
    return element * max(share, *(held.whole for held in _held_by_rank(config, facts)))


def stepping_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What DeepSpeed holds of gradients when it steps; 0 where the step is on the host.

    Its stages 1 and 2 put a rank's gradients in one piece and, where they are of 16 bits, cast that to fp32, while all
    that was reduced is still there; before that each is cast to fp64 for the norm. Stage 3 does so for a billion
    parameters at a time, unless more or less was typed (0.19.8, stage_1_and_2.py and stage3.py, step; followed in
    tests/parallel/test_zero_moments.py).
    """
    settings = config.parallelism
    if not isinstance(settings, ZeroConfig) or settings.offload_optimizer is not Offload.none:
        return 0.0
    ranks, element = num_ranks(config), trained_element(config)
    share, cast = count_parameters(config, facts).trained / ranks, 4 if element == 2 else 0
    if strategy_facts(config).is_zero3:
        at_once, largest = min(share, settings.sub_group_size or _SUB_GROUP), max(trained_sizes(config, facts)) / ranks
        return element * share + max(at_once * (element + cast), _FP64 * largest)
    return max(
        element * max(share, held.whole) + max(share * (element + cast), _FP64 * held.largest)
        for held in _held_by_rank(config, facts)
    )


@dataclass(frozen=True, kw_only=True)
class _Held:
    """Numbers of parameters of which a rank of DeepSpeed's stages 1 and 2 has a piece."""

    whole: int  # of all such parameters
    largest: float  # of the largest piece


def _held_by_rank(config: RunConfig, facts: ModelFacts) -> list[_Held]:
    """By rank, as DeepSpeed puts all large parameters that are trained one behind the other and cuts them."""
    ranks, sizes = num_ranks(config), trained_sizes(config, facts)
    is_dealt = getattr(config.parallelism, "round_robin_gradients", None)
    ordered = [size for rank in range(ranks) for size in sizes[rank::ranks]] if is_dealt else sizes
    share, start, whole, largest = sum(ordered) / ranks, 0, [0] * ranks, [0.0] * ranks
    for size in ordered:
        for rank in range(int(start // share), min(ranks - 1, int((start + size - 1) // share)) + 1):
            whole[rank] += size
            piece = min(start + size, (rank + 1) * share) - max(start, rank * share)
            largest[rank] = max(largest[rank], piece)
        start += size
    return [_Held(whole=whole[rank], largest=largest[rank]) for rank in range(ranks)]


def states_anywhere(config: RunConfig, facts: ModelFacts) -> States:
    """One rank's share of the model's states, wherever it is kept."""
    parameters, shares, element = count_parameters(config, facts), divided_among(config), trained_element(config)
    return States(
        weights=(parameters.trained * element + _frozen_bytes(config, facts)) / shares.weights,
        gradients=parameters.trained * element / shares.gradients,
        optimizer=(_moments_bytes(config, facts) + parameters.trained * _master_element(config)) / shares.optimizer,
        gradient_element=element,
    )


def paged_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """One rank's moments, where the driver moves them between GPU and host as they are needed. A master copy stays."""
    if not OPTIMIZERS[config.optimizer.name].is_paged:
        return 0.0
    return _moments_bytes(config, facts) / divided_among(config).optimizer


def _frozen_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Of a base model under adapters. Only linear layers are quantised: not embeddings, head and stacked experts."""
    parameters, element = count_parameters(config, facts), weight_element(config)
    if config.peft.method is not PeftMethod.qlora:
        return float(parameters.frozen * element)
    return parameters.linear * FOUR_BIT_BYTES + (parameters.frozen - parameters.linear) * element


def weight_element(config: RunConfig) -> int:
    """Bytes of a weight as the model holds it: DeepSpeed's own mixed precision casts it to 16 bits."""
    return 2 if is_cast_by_deepspeed(config) or config.precision.master_weights is MasterWeights.bf16 else 4


def trained_element(config: RunConfig) -> int:
    """Bytes of a weight that is trained. Adapters are in fp32 over bf16 weights, but where DeepSpeed casts them."""
    is_adapter = config.peft.method is not PeftMethod.full
    return 4 if is_adapter and not isinstance(config.parallelism, ZeroConfig) else weight_element(config)


def product_element(config: RunConfig) -> int:
    """Bytes of a number that goes into a product."""
    return 4 if config.precision.compute is Compute.fp32 else 2


def has_parameters_away(config: RunConfig) -> bool:
    """Whether the model's parameters are kept on the host or on its disks."""
    settings = config.parallelism
    return isinstance(settings, ZeroConfig | FsdpConfig) and settings.offload_parameters is not Offload.none


def _moments_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Of all moments, before they are divided. Measured in 8 bits: Phi-4's 4 layers on two H200 with DDP."""
    parameters, element = count_parameters(config, facts), _moments_element(config)
    optimizer = OPTIMIZERS[config.optimizer.name]
    if not optimizer.keeps_embeddings_in_fp32 or isinstance(config.parallelism, ZeroConfig):
        matrices = parameters.trained - parameters.trained_embeddings
        matrices -= 0 if facts.tie_word_embeddings else parameters.trained_head
        return parameters.trained * element - matrices * element * (1 - optimizer.matrix_moments / 2)
    embeddings = parameters.trained_embeddings
    return float((parameters.trained - embeddings) * element + embeddings * _MOMENTS_OF_EMBEDDINGS)


def _moments_element(config: RunConfig) -> float:
    """Bytes of two moments per trained parameter.

    torch's are in the format of the weights, bitsandbytes' of 32 bits always fp32 (0.50, optim/optimizer.py).
    """
    is_bf16 = trained_element(config) == 2 and not isinstance(config.parallelism, ZeroConfig)
    state_bytes = OPTIMIZERS[config.optimizer.name].state_bytes
    return state_bytes if state_bytes is not None else 4 if is_bf16 else 8


def _master_element(config: RunConfig) -> int:
    """Bytes of DeepSpeed's fp32 copy per trained parameter.

    ZeRO-3 would update fp32 weights on the GPU where they are, but looks for that at a device and its name, which are
    never equal, and so clones them (0.19.8, `stage3.py`, `_create_fp32_partitions`; a test asks it).
    """
    return 4 if isinstance(config.parallelism, ZeroConfig) else 0


def num_ranks(config: RunConfig) -> int:
    """GPUs of all nodes; at least 1, also where a broken number is reported by its own rule."""
    return max(1, config.hardware.num_nodes) * max(1, config.hardware.gpus_per_node or 1)


def divided_among(config: RunConfig) -> Shares:
    """How the strategy divides the states."""
    facts, ranks = strategy_facts(config), num_ranks(config)
    if facts.within_groups:
        named = config.parallelism.shard_group_size if isinstance(config.parallelism, FsdpConfig) else None
        ranks = max(1, named or config.hardware.gpus_per_node or 1)
    return Shares(  # what stays gathered for a pass is divided all the same
        weights=ranks if facts.divides_weights else 1,
        gradients=ranks if facts.divides_gradients else 1,
        optimizer=ranks if facts.divides_optimizer else 1,
    )
