"""The memory of one node's host: during loading, for offloaded states, and while the model is saved.

    processes   Python and its libraries in every rank
    training    on a CPU: the tensors that ranks train with, which are on the GPUs otherwise
    loading     weights that the ranks hold before they are on the GPUs
    offload     weights, gradients, optimizer state and activations that live on the host
    saving      the full model, gathered to be written

The numbers come from arithmetic and from reading the packages (versions are next to each number), for the node of rank
0. Loading and offloading have been measured (benchmarks/results, loading_memory and h200x2_host_memory). File cache
pages are not counted, because the kernel reclaims them.

What is copied to and from a GPU is page-locked, since only such memory is copied while the GPU computes; Adam's moments
are not. PyTorch gives such a block the next power of two bytes, so 2.3 GiB take 4 (torch 2.13, CachingHostAllocator.h).
It keeps freed blocks for others of their size. Blocks of shorter rows, which stay next to those of the longest, are not
counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tunebook.config.choices import Generation, MasterWeights, Offload, PeftMethod, Weights
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig
from tunebook.facts.sharing import Sharing, offloaded_states, sharing_of, stays_whole
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import count_parameters, largest_parameter, trained_sizes, weight_sizes
from tunebook.parallel.deepspeed import nvme_bytes
from tunebook.plan.memory.activations import activations_of
from tunebook.plan.memory.ledger import page_locked
from tunebook.plan.memory.overhead import PROCESS_BYTES
from tunebook.plan.memory.states import (
    FOUR_BIT_BYTES,
    bytes_per_weight,
    paged_bytes,
    shard_counts,
    state_bytes_with_offloaded,
)

# A GPU process, whose CUDA build has larger libraries: 1.8 to 2.9 GiB in eleven runs (h200x2_host_memory).
GPU_PROCESS_BYTES = 2 * 2**30
# DeepSpeed 0.19.8, runtime/zero/offload_config.py: buffers between host and NVMe, and what else stays on the host.
_PARAMETER_BUFFERS, _PARAMETER_BUFFER_ELEMENTS, _MAX_IN_CPU = 5, 100_000_000, 1_000_000_000
_OPTIMIZER_BUFFERS, _SUB_GROUP_ELEMENTS = 4, 1_000_000_000
_LARGEST_FILE = 50_000_000_000  # bytes; transformers 5.23 writes at most this into one file, copied from the GPU


@dataclass(frozen=True, kw_only=True)
class HostBytes:
    """Bytes of one node's memory; `nvme` is bytes of its disk."""

    processes: float
    training: float
    loading: float
    offload: float
    saving: float
    nvme: float

    @property
    def peak(self) -> float:
        """Peak bytes: offloaded states exist while the model is saved, but not yet while it is loaded."""
        return self.processes + max(self.loading, self.training + self.offload + self.saving)


@dataclass(frozen=True, kw_only=True)
class Offloaded:
    """Offloaded bytes of one rank."""

    host: float = 0.0
    nvme: float = 0.0


def host_bytes(config: RunConfig, facts: ModelFacts, *, tensors: float) -> HostBytes:
    """Host memory of the node of rank 0. `tensors`: a rank's device peak, which on a CPU is host memory."""
    ranks = config.hardware.gpus_per_node or 1
    is_cpu = config.hardware.generation is Generation.cpu
    offloaded = offloaded_bytes(config, facts)
    return HostBytes(
        processes=float(ranks * (PROCESS_BYTES if is_cpu else GPU_PROCESS_BYTES)),
        training=ranks * tensors if is_cpu else 0.0,
        loading=loading_bytes(config, facts),
        offload=ranks * (offloaded.host + paged_bytes(config, facts) + _offloaded_activations(config)),
        saving=saving_bytes(config, facts),
        nvme=ranks * offloaded.nvme,
    )


def _offloaded_activations(config: RunConfig) -> float:
    """Bytes of a pass that one rank copies to the host, and what TRL's offloading treats as such."""
    return activations_of(config, accumulates=False).offloaded if config.activation.offload else 0.0


def _each_page_locked(sizes: Iterable[float], element: float) -> float:
    """Bytes of a block for each of the tensors with so many elements."""
    return sum(page_locked(element * size) for size in sizes)


def offloaded_bytes(config: RunConfig, facts: ModelFacts) -> Offloaded:
    """Bytes of the model's states that one rank keeps off its device."""
    settings = config.parallelism
    states = state_bytes_with_offloaded(config, facts)
    if isinstance(settings, FsdpConfig) and offloaded_states(config):
        # Each parameter's share is page-locked, and so is its gradient (torch 2.13, _fsdp_param.py; `Tensor.to`).
        gradients = states.bytes_per_gradient / shard_counts(config).gradients
        locked = _weights_apart(config, facts) + _each_page_locked(trained_sizes(config, facts), gradients)
        return Offloaded(host=locked + states.optimizer)
    if not isinstance(settings, ZeroConfig):
        return Offloaded()
    optimizer, weights = _zero_optimizer(config, facts, settings), _zero_weights(config, facts, settings)
    return Offloaded(host=optimizer + weights, nvme=nvme_bytes(config, facts))


def _weights_apart(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of a rank's shares of all weights, each in a block of its own."""
    element, shares = bytes_per_weight(config), shard_counts(config).weights
    matrices = [round(size) for size in weight_sizes(facts).values()] * facts.num_layers
    every = Counter(trained_sizes(replace(config, peft=replace(config.peft, method=PeftMethod.full)), facts))
    others = [*(every - Counter(matrices)).elements()]
    if config.peft.method is not PeftMethod.full:
        others += trained_sizes(config, facts)
    of_matrix = FOUR_BIT_BYTES if config.peft.method is PeftMethod.qlora else element
    locked = _each_page_locked(matrices, of_matrix / shares) + _each_page_locked(others, element / shares)
    in_blocks = (of_matrix * sum(matrices) + element * sum(others)) / shares
    return locked + max(0.0, state_bytes_with_offloaded(config, facts).weights - in_blocks)  # norms are small


def _zero_optimizer(config: RunConfig, facts: ModelFacts, settings: ZeroConfig) -> float:
    """Bytes of master copy and moments, 12 per parameter, and of the fp32 gradient for the update, 4 per parameter.

    More buffers are in the format of the weights: in stages 1 and 2 the updated weights in transit and one parameter's
    gradient, in stage 3 the arriving gradients (DeepSpeed 0.19.8: `param_buffer_of_bit16_for_cpu_offload_groups`,
    `temp_grad_buffer_for_cpu_offload`, `grad_partitions_flat_buffer`). Page-locked are these buffers, the gradient, in
    stage 3 for each sub-group, and in stages 1 and 2 the master copy.
    """
    if settings.offload_optimizer is Offload.none:
        return 0.0
    mine, element = count_parameters(config, facts).trained / shard_counts(config).optimizer, bytes_per_weight(config)
    group = min(mine, settings.sub_group_size or _SUB_GROUP_ELEMENTS)
    locked = _block_of(settings)
    if settings.offload_optimizer is not Offload.cpu:
        return locked(element * mine) + _OPTIMIZER_BUFFERS * 4 * group
    moments, buffer = 8 * mine, locked(element * mine)
    if not strategy_facts(config).is_zero3:
        return moments + 2 * locked(4 * mine) + buffer + locked(float(element * max(trained_sizes(config, facts))))
    groups, left = divmod(mine, max(1.0, group))
    return moments + 4 * mine + groups * locked(4 * group) + locked(4 * left) + buffer


def _block_of(settings: ZeroConfig) -> Callable[[float], float]:
    """The bytes of a buffer: page-locked unless that is switched off (DeepSpeed's default)."""
    return float if settings.pin_memory is False else page_locked


def _zero_weights(config: RunConfig, facts: ModelFacts, settings: ZeroConfig) -> float:
    weights = state_bytes_with_offloaded(config, facts).weights
    if settings.offload_parameters is Offload.none:
        return 0.0
    if settings.offload_parameters is Offload.cpu:
        # Each share is page-locked before all are in one buffer, and PyTorch keeps its block.
        return weights if settings.pin_memory is False else page_locked(weights) + _weights_apart(config, facts)
    element, shares = bytes_per_weight(config), shard_counts(config)
    largest = largest_parameter(facts) / shares.weights
    buffers = _PARAMETER_BUFFERS * max(_PARAMETER_BUFFER_ELEMENTS, largest)
    stays = min(count_parameters(config, facts).trained / shares.weights, _MAX_IN_CPU)
    return element * buffers + _block_of(settings)(element * stays)


def loading_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of weights that the node's ranks hold at once while loading (see `model.load`)."""
    ranks, element = (config.hardware.gpus_per_node or 1), _loaded_bytes_per_weight(config)
    sharing, largest = sharing_of(config), largest_parameter(facts)
    is_cpu = config.hardware.generation is Generation.cpu
    reads_piecewise = stays_whole(config) or config.peft.method is PeftMethod.qlora
    if config.model.weights is Weights.random and not (is_cpu and stays_whole(config)):
        # Rank 0 draws them in fp32. Every rank does if each keeps what it has drawn.
        whole = 4.0 * facts.num_parameters * (1 if sharing is not Sharing.each or stays_whole(config) else ranks)
    elif sharing is Sharing.send:
        whole = float(element * facts.num_parameters)  # measured: 4.0 bytes for each of 1.01 billion in fp32
    elif sharing is Sharing.scatter:  # measured: twice the largest parameter, on a CPU in every rank
        whole = 2.0 * largest * bytes_per_weight(config) * (ranks if is_cpu else 1)
    elif reads_piecewise:  # directly to the training device, one parameter at a time
        whole = float(ranks * largest * element)
    else:
        whole = float(ranks * element * facts.num_parameters)
    return whole + ranks * _filled_on_host(config, facts)


def _filled_on_host(config: RunConfig, facts: ModelFacts) -> float:
    """One rank's part of the weights, if it stays on the host while others are still being loaded."""
    is_cpu = config.hardware.generation is Generation.cpu
    is_away = offloaded_states(config).get("offload_parameters") is Offload.cpu
    is_filled = is_cpu and (stays_whole(config) or sharing_of(config) is Sharing.scatter)
    return state_bytes_with_offloaded(config, facts).weights if is_away or is_filled else 0.0


def saving_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of the copies of the model made to write it (transformers 5.23, accelerate 1.15, DeepSpeed 0.19.8).

    Saving needs no more GPU memory than a pass: sharded weights are gathered one layer or parameter at a time, when no
    activations exist.
    """
    parameters, settings, element = count_parameters(config, facts), config.parallelism, bytes_per_weight(config)
    is_adapter = config.peft.method is not PeftMethod.full
    states = state_bytes_with_offloaded(config, facts)
    model = states.weights * shard_counts(config).weights  # full model, quantized or not, with the adapter
    if isinstance(settings, ZeroConfig) and strategy_facts(config).is_zero3:
        if not settings.gather_weights_on_save:
            return 0.0
        return float(parameters.trained * element) if is_adapter else model  # gathered on rank 0
    if isinstance(settings, ZeroConfig):  # `Accelerator.get_state_dict` clones it to the host, on every rank
        return (config.hardware.gpus_per_node or 1) * model
    if isinstance(settings, FsdpConfig):
        return model  # gathered on rank 0
    return min(float(parameters.trained * element), _LARGEST_FILE)  # copied from rank 0's GPU


def _loaded_bytes_per_weight(config: RunConfig) -> int:
    """Bytes of one weight while it is loaded; DeepSpeed may cast it later."""
    return 2 if config.precision.master_weights is MasterWeights.bf16 else 4
