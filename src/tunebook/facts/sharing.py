"""Which ranks read the weights, how the others get them, and whether a GPU holds the whole model.

All of this follows from the configuration alone. `model.load` does it; `plan.memory.host` plans its host memory.
"""

from __future__ import annotations

from enum import Enum

from tunebook.config.choices import Compute, MasterWeights, MixedPrecision, Offload, PeftMethod
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig
from tunebook.facts.strategies import strategy_facts


class Sharing(Enum):
    """How the ranks get their weights."""

    each = "each"
    send = "send"
    scatter = "scatter"


def sharing_of(config: RunConfig) -> Sharing:
    """How a run's ranks get their weights. With every strategy, each rank reads weights that are quantized on load."""
    settings = config.parallelism
    if config.peft.method is PeftMethod.qlora:
        return Sharing.each
    if strategy_facts(config).is_zero3:
        return Sharing.scatter
    if isinstance(settings, FsdpConfig) and settings.cpu_ram_efficient_loading:
        return Sharing.send
    return Sharing.each


def stays_whole(config: RunConfig) -> bool:
    """Whether each rank trains with the whole model on its GPU, in the format in which it is loaded.

    Such a model needs no host memory: it is read straight into the GPU, or initialized by rank 0 and copied from GPU to
    GPU. False if DeepSpeed casts the model before moving it, because the GPU would hold it in fp32 first.
    """
    return not strategy_facts(config).divides_weights and not is_cast_by_deepspeed(config)


def is_cast_by_deepspeed(config: RunConfig) -> bool:
    """Whether DeepSpeed casts the whole model, including adapters, to 16 bits instead of using torch's autocast.

    It always casts to fp16 (`parallel.deepspeed` says why).
    """
    zero, compute = config.parallelism, config.precision.compute
    if not isinstance(zero, ZeroConfig) or compute is Compute.fp32:
        return False
    return compute is Compute.fp16 or zero.mixed_precision is MixedPrecision.cast


def mixes_formats(config: RunConfig) -> bool:
    """Whether fp32 weights are used in bf16 or fp16 computation. bf16 weights need no mixed precision."""
    precision = config.precision
    return precision.compute is not Compute.fp32 and precision.master_weights is not MasterWeights.bf16


def is_offloaded(config: RunConfig) -> bool:
    """Whether weights, optimizer states or activations are in host memory or on a disk."""
    return bool(config.activation.offload or offloaded_states(config))


def offloaded_states(config: RunConfig) -> dict[str, Offload]:
    """Where the strategy keeps states that are not on the GPUs, by the keys of `parallelism` for them."""
    keys = ("offload_optimizer", "offload_parameters")
    places = {key: getattr(config.parallelism, key, Offload.none) for key in keys}
    return {key: place for key, place in places.items() if place is not Offload.none}


def uses_nvme(config: RunConfig) -> bool:
    """Whether any state is in files on NVMe."""
    return Offload.nvme in offloaded_states(config).values()
