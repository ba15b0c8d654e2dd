"""The memory of one node's host: while loading, for what is offloaded, and while the model is saved.

    processes   Python and its libraries in every rank
    training    on a CPU: the tensors that the ranks train with, which elsewhere are on the GPUs
    loading     what the ranks hold of the weights before they are on the GPUs
    offload     weights, gradients, optimizer state and activations that live on the host
    saving      the whole model, gathered to be written

By arithmetic and by reading the packages (versions beside each number), for the node that holds rank 0: no host has
been measured but for loading (tests/bench/results/loading_memory.jsonl). Pages of files are not counted, because the
kernel takes them back; nor is what PyTorch adds to page-locked memory when it rounds each piece up to a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunebook.config.choices import Checkpointing, Generation, MasterWeights, Offload, PeftMethod, Weights
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig
from tunebook.facts.sharing import Sharing, sharing_of, stays_whole
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import count_parameters, largest_parameter
from tunebook.parallel.deepspeed import nvme_bytes
from tunebook.plan.memory.kept import inputs_of_layers, kept_by_layers, kept_by_one_layer
from tunebook.plan.memory.overhead import PROCESS
from tunebook.plan.memory.sharding import cast_copies_bytes
from tunebook.plan.memory.states import divided_among, paged_bytes, states_anywhere, weight_element

# Assumed: a process on a GPU, whose CUDA build brings larger libraries and page-locked buffers.
GPU_PROCESS = 2 * 2**30
# DeepSpeed 0.19.8, runtime/zero/offload_config.py: buffers between host and NVMe, and what stays on the host besides.
_PARAMETER_BUFFERS, _PARAMETER_BUFFER_ELEMENTS, _MAX_IN_CPU = 5, 100_000_000, 1_000_000_000
_OPTIMIZER_BUFFERS, _SUB_GROUP_ELEMENTS = 4, 1_000_000_000
_LARGEST_FILE = 50_000_000_000  # bytes that transformers 5.23 writes into one file, and copies from the GPU for it


@dataclass(frozen=True, kw_only=True)
class HostBytes:
    """Bytes of one node; on NVMe, of its disk."""

    processes: float
    training: float
    loading: float
    offload: float
    saving: float
    nvme: float

    @property
    def peak(self) -> float:
        """What is offloaded is still there when the model is saved, and not yet when it is loaded."""
        return self.processes + max(self.loading, self.training + self.offload + self.saving)


@dataclass(frozen=True, kw_only=True)
class Offloaded:
    """Bytes of one rank."""

    host: float = 0.0
    nvme: float = 0.0


def host_bytes(config: RunConfig, facts: ModelFacts, *, tensors: float, is_recomputed: bool) -> HostBytes:
    """Of the node that holds rank 0. `tensors`: a rank's peak on its device, which on a CPU is this memory."""
    ranks = max(1, config.hardware.gpus_per_node or 1)
    is_cpu = config.hardware.generation is Generation.cpu
    offloaded = offloaded_bytes(config, facts)
    kept = offloaded_activation_bytes(config, facts, is_recomputed=is_recomputed)
    return HostBytes(
        processes=float(ranks * (PROCESS if is_cpu else GPU_PROCESS)),
        training=ranks * tensors if is_cpu else 0.0,
        loading=loading_bytes(config, facts),
        offload=ranks * (offloaded.host + paged_bytes(config, facts) + kept),
        saving=saving_bytes(config, facts),
        nvme=ranks * offloaded.nvme,
    )


def offloaded_activation_bytes(config: RunConfig, facts: ModelFacts, *, is_recomputed: bool) -> float:
    """What one rank keeps of a pass away from its device, and what TRL's offloading (1.16) takes for a part of that.

    It takes autocast's copies of weights with it. Weights themselves stay (`train.offloaded_weights`).
    """
    if not config.activation.offload:
        return 0.0
    casts_again = is_recomputed or config.activation.checkpointing is Checkpointing.selective
    copies = 0.0 if casts_again else cast_copies_bytes(config, facts)
    if is_recomputed:
        return inputs_of_layers(config, facts) + kept_by_one_layer(config, facts)
    return kept_by_layers(config, facts) + copies


def offloaded_bytes(config: RunConfig, facts: ModelFacts) -> Offloaded:
    """What one rank keeps of the model's states away from its device."""
    settings = config.parallelism
    states = states_anywhere(config, facts)
    if isinstance(settings, FsdpConfig) and settings.offload_parameters is not Offload.none:
        return Offloaded(host=states.weights + states.gradients + states.optimizer)
    if not isinstance(settings, ZeroConfig):
        return Offloaded()
    optimizer, weights = _zero_optimizer(config, facts, settings), _zero_weights(config, facts, settings)
    return Offloaded(host=optimizer + weights, nvme=nvme_bytes(config, facts))


def _zero_optimizer(config: RunConfig, facts: ModelFacts, settings: ZeroConfig) -> float:
    """Master copy and moments, 12 bytes, and the gradient that they are updated with in fp32, 4 bytes.

    Besides, in the format of the weights: stages 1 and 2 the updated weights on their way back, stage 3 the gradients
    as they arrive (DeepSpeed 0.19.8: `param_buffer_of_bit16_for_cpu_offload_groups`, `grad_partitions_flat_buffer`).
    """
    if settings.offload_optimizer is Offload.none:
        return 0.0
    mine = count_parameters(config, facts).trained / divided_among(config).optimizer
    beside = mine * weight_element(config)
    if settings.offload_optimizer is Offload.cpu:
        return 16 * mine + beside
    group = min(mine, settings.sub_group_size or _SUB_GROUP_ELEMENTS)
    return beside + _OPTIMIZER_BUFFERS * 4 * group


def _zero_weights(config: RunConfig, facts: ModelFacts, settings: ZeroConfig) -> float:
    weights = states_anywhere(config, facts).weights
    if settings.offload_parameters is Offload.none:
        return 0.0
    if settings.offload_parameters is Offload.cpu:
        return weights
    element, shares = weight_element(config), divided_among(config)
    largest = largest_parameter(facts) / shares.weights
    buffers = _PARAMETER_BUFFERS * max(_PARAMETER_BUFFER_ELEMENTS, largest)
    stays = min(count_parameters(config, facts).trained / shares.weights, _MAX_IN_CPU)
    return element * (buffers + stays)


def loading_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """What the ranks of the node hold of the weights at once (see `model.load`)."""
    ranks, element = max(1, config.hardware.gpus_per_node or 1), _loaded_element(config)
    sharing, largest = sharing_of(config), largest_parameter(facts)
    is_cpu = config.hardware.generation is Generation.cpu
    reads_piecewise = stays_whole(config) or config.peft.method is PeftMethod.qlora
    if config.model.weights is Weights.random and not (is_cpu and stays_whole(config)):
        # Drawn in fp32 by rank 0, and by every rank where each keeps what it has drawn.
        whole = 4.0 * facts.num_parameters * (1 if sharing is not Sharing.each or stays_whole(config) else ranks)
    elif sharing is Sharing.send:
        whole = float(element * facts.num_parameters)  # measured: 4.0 bytes for each of 1.01 billion in fp32
    elif sharing is Sharing.scatter:  # measured: twice the largest parameter, on a CPU in every rank
        whole = 2.0 * largest * weight_element(config) * (ranks if is_cpu else 1)
    elif reads_piecewise:  # straight to where it is trained, one parameter at a time
        whole = float(ranks * largest * element)
    else:
        whole = float(ranks * element * facts.num_parameters)
    return whole + ranks * _filled_on_host(config, facts)


def _filled_on_host(config: RunConfig, facts: ModelFacts) -> float:
    """One rank's part of the weights, where it stays on the host while others are still being loaded."""
    settings, is_cpu = config.parallelism, config.hardware.generation is Generation.cpu
    is_away = isinstance(settings, ZeroConfig | FsdpConfig) and settings.offload_parameters is Offload.cpu
    is_filled = is_cpu and (stays_whole(config) or sharing_of(config) is Sharing.scatter)
    return states_anywhere(config, facts).weights if is_away or is_filled else 0.0


def saving_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """The copies of the model made to write it (transformers 5.23, accelerate 1.15, DeepSpeed 0.19.8).

    The GPUs need nothing for it that a pass did not need: sharded weights are gathered one layer or parameter at a
    time, when no activation is there.
    """
    parameters, settings, element = count_parameters(config, facts), config.parallelism, weight_element(config)
    is_adapter = config.peft.method is not PeftMethod.full
    states = states_anywhere(config, facts)
    model = states.weights * divided_among(config).weights  # whole, quantised or not, with the adapter
    if isinstance(settings, ZeroConfig) and strategy_facts(config).is_zero3:
        if not settings.gather_weights_on_save:
            return 0.0
        return float(parameters.trained * element) if is_adapter else model  # gathered on rank 0
    if isinstance(settings, ZeroConfig):  # `Accelerator.get_state_dict` clones it to the host, on every rank
        return max(1, config.hardware.gpus_per_node or 1) * model
    if isinstance(settings, FsdpConfig):
        return model  # gathered on rank 0
    return min(float(parameters.trained * element), _LARGEST_FILE)  # copied from rank 0's GPU


def _loaded_element(config: RunConfig) -> int:
    """Bytes of a weight as it is loaded, which DeepSpeed may cast later."""
    return 2 if config.precision.master_weights is MasterWeights.bf16 else 4
