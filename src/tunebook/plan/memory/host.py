"""The memory of one node's host: during loading, for offloaded states, and while the model is saved.

    processes   Python and its libraries in every rank
    training    on a CPU: the tensors that ranks train with, which are on the GPUs otherwise
    loading     weights that the ranks hold before they are on the GPUs
    offload     weights, gradients, optimizer state and activations that live on the host
    saving      the full model, gathered to be written

The node is that of rank 0. Loading and offloading have been measured (benchmarks/results, loading_memory and
h200x2_host_memory). File cache pages are not counted, because the kernel reclaims them.

What is copied to and from a GPU is page-locked, since only such memory is copied while the GPU computes; Adam's moments
are not. PyTorch gives such a block the next power of two bytes, so 2.3 GiB take 4 (torch 2.13, CachingHostAllocator.h).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tunebook.config.choices import Generation, MasterWeights, Offload, PeftMethod, Weights
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig
from tunebook.facts.sharing import Sharing, offloaded_states, sharing_of, stays_whole
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import count_parameters, largest_parameter, trained_sizes
from tunebook.plan.memory import GIB, estimate_memory
from tunebook.plan.memory.activations import activations_of
from tunebook.plan.memory.ledger import page_locked
from tunebook.plan.memory.states import bytes_per_weight, paged_bytes, shard_counts, state_bytes_with_offloaded

# The resident memory of a rank after all imports and the rendezvous, before it loads a model: of a CPU build of torch
# 2.13, and of a CUDA build, whose libraries are larger: 1.8 to 2.9 GiB (h200x2_host_memory).
PROCESS_BYTES, GPU_PROCESS_BYTES = 502 * 2**20, 2 * GIB
# DeepSpeed 0.19.8, runtime/zero/offload_config.py: buffers between host and NVMe, and what else stays on the host.
_PARAMETER_BUFFERS, _PARAMETER_BUFFER_ELEMENTS, _MAX_IN_CPU = 5, 100_000_000, 1_000_000_000
_OPTIMIZER_BUFFERS, _SUB_GROUP_ELEMENTS = 4, 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class HostBytes:
    """Bytes of one node's memory."""

    processes: float
    training: float
    loading: float
    offload: float
    saving: float

    @property
    def peak(self) -> float:
        """Peak bytes: offloaded states exist while the model is saved, but not yet while it is loaded."""
        return self.processes + max(self.loading, self.training + self.offload + self.saving)


def host_bytes(config: RunConfig, facts: ModelFacts) -> HostBytes:
    """Host memory of the node of rank 0."""
    ranks = config.hardware.gpus_per_node or 1
    is_cpu = config.hardware.generation is Generation.cpu
    offloaded = offloaded_bytes(config, facts) + paged_bytes(config, facts)
    if config.activation.offload:
        offloaded += activations_of(config, accumulates=False).offloaded
    return HostBytes(
        processes=float(ranks * (PROCESS_BYTES if is_cpu else GPU_PROCESS_BYTES)),
        training=ranks * estimate_memory(config, facts).total_gib * GIB if is_cpu else 0.0,
        loading=loading_bytes(config, facts),
        offload=ranks * offloaded,
        saving=saving_bytes(config, facts),
    )


def offloaded_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of the model's states that one rank keeps on the host."""
    settings = config.parallelism
    if isinstance(settings, ZeroConfig):
        return _zero_optimizer(config, facts, settings) + _zero_weights(config, facts, settings)
    if not isinstance(settings, FsdpConfig) or not offloaded_states(config):
        return 0.0
    # Each parameter's share is page-locked, and so is its gradient (torch 2.13, _fsdp_param.py; `Tensor.to`).
    states = state_bytes_with_offloaded(config, facts)
    element = states.bytes_per_gradient / shard_counts(config).gradients
    gradients = sum(page_locked(element * size) for size in trained_sizes(config, facts))
    return _weights_in_blocks(config, facts) + gradients + states.optimizer


def _weights_in_blocks(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of a rank's share of all weights, each weight in a block of its own, as if none were quantized."""
    element = bytes_per_weight(config) / shard_counts(config).weights
    full = replace(config, peft=replace(config.peft, method=PeftMethod.full))
    sizes = [element * size for size in trained_sizes(full, facts)]
    return state_bytes_with_offloaded(config, facts).weights * sum(map(page_locked, sizes)) / sum(sizes)


def _zero_optimizer(config: RunConfig, facts: ModelFacts, settings: ZeroConfig) -> float:
    """Bytes of master copy and moments, 12 per parameter, of the fp32 gradient for the update, and of buffers.

    The buffers are in the format of the weights: in stages 1 and 2 the updated weights in transit and the largest
    gradient, in stage 3 the arriving gradients (DeepSpeed 0.19.8: `param_buffer_of_bit16_for_cpu_offload_groups`,
    `temp_grad_buffer_for_cpu_offload`, `grad_partitions_flat_buffer`). Page-locked are these buffers, the gradient, in
    stage 3 for each sub-group, and in stages 1 and 2 the master copy.
    """
    if settings.offload_optimizer is Offload.none:
        return 0.0
    mine, element = count_parameters(config, facts).trained / shard_counts(config).optimizer, bytes_per_weight(config)
    group = min(mine, settings.sub_group_size or _SUB_GROUP_ELEMENTS)
    buffer = page_locked(element * mine)
    if settings.offload_optimizer is Offload.nvme:
        return buffer + _OPTIMIZER_BUFFERS * 4 * group
    if strategy_facts(config).is_zero3:
        return 12 * mine + math.ceil(mine / group) * page_locked(4 * group) + buffer
    return 8 * mine + 2 * page_locked(4 * mine) + buffer + page_locked(element * max(trained_sizes(config, facts)))


def _zero_weights(config: RunConfig, facts: ModelFacts, settings: ZeroConfig) -> float:
    """Bytes of offloaded weights. Each is page-locked before all are in one buffer, and PyTorch keeps its block."""
    if settings.offload_parameters is Offload.none:
        return 0.0
    if settings.offload_parameters is Offload.cpu:
        weights = state_bytes_with_offloaded(config, facts).weights
        return page_locked(weights) + _weights_in_blocks(config, facts)
    element, shares = bytes_per_weight(config), shard_counts(config).weights
    buffer = max(_PARAMETER_BUFFER_ELEMENTS, largest_parameter(facts) / shares)
    stays = min(count_parameters(config, facts).trained / shares, _MAX_IN_CPU)
    return element * _PARAMETER_BUFFERS * buffer + page_locked(element * stays)


def loading_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of weights that the node's ranks hold at once while loading (see `model.load`)."""
    ranks, sharing = (config.hardware.gpus_per_node or 1), sharing_of(config)
    element = 2 if config.precision.master_weights is MasterWeights.bf16 else 4  # DeepSpeed may cast it later
    is_cpu, largest = config.hardware.generation is Generation.cpu, largest_parameter(facts)
    readers = ranks if sharing is Sharing.each else 1
    if config.model.weights is Weights.random:  # drawn in fp32, by rank 0 if all get the whole model
        held = 4.0 * facts.num_parameters * (1 if stays_whole(config) else readers)
    elif sharing is Sharing.scatter:  # measured: twice the largest parameter, on a CPU in every rank
        held = 2.0 * largest * bytes_per_weight(config) * (ranks if is_cpu else 1)
    elif sharing is Sharing.each and (stays_whole(config) or config.peft.method is PeftMethod.qlora):
        held = float(ranks * largest * element)  # directly to the training device, one parameter at a time
    else:
        held = float(readers * element * facts.num_parameters)
    if is_cpu or offloaded_states(config).get("offload_parameters") is Offload.cpu:
        held += ranks * state_bytes_with_offloaded(config, facts).weights  # what is loaded stays on the host
    return held


def saving_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of the copies of the model made to write it (transformers 5.23, accelerate 1.15, DeepSpeed 0.19.8)."""
    settings, strategy = config.parallelism, strategy_facts(config)
    model = state_bytes_with_offloaded(config, facts).weights * shard_counts(config).weights  # with the adapter
    if isinstance(settings, FsdpConfig):
        return model  # gathered on rank 0
    if isinstance(settings, ZeroConfig) and not strategy.is_zero3:
        return (config.hardware.gpus_per_node or 1) * model  # `Accelerator.get_state_dict` clones it on every rank
    is_adapter = config.peft.method is not PeftMethod.full
    return float(count_parameters(config, facts).trained * bytes_per_weight(config)) if is_adapter else model
