"""Who reads the weights, what the other ranks start from, and whether the GPU keeps all: from the configuration alone.

`model.load` says how it is done, `plan.memory.host` what it takes of the host's memory.
"""

from __future__ import annotations

from enum import Enum

from tunebook.config.choices import Compute, MasterWeights, MixedPrecision, Offload, PeftMethod
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig
from tunebook.facts.strategies import strategy_facts


class Sharing(Enum):
    """How the ranks come to their weights."""

    each = "each"
    send = "send"
    scatter = "scatter"


def sharing_of(config: RunConfig) -> Sharing:
    """The way of a run. Weights that are quantised while they are read are read by each rank, whatever the strategy."""
    settings = config.parallelism
    if config.peft.method is PeftMethod.qlora:
        return Sharing.each
    if strategy_facts(config).is_zero3:
        return Sharing.scatter
    if isinstance(settings, FsdpConfig) and settings.cpu_ram_efficient_loading:
        return Sharing.send
    return Sharing.each


def stays_whole(config: RunConfig) -> bool:
    """Whether a rank trains with the whole model on its GPU, in the format that it is loaded in.

    Such a model is read straight into the GPU, or drawn by rank 0 and copied from GPU to GPU: no host memory for it.
    Not where DeepSpeed casts the model before it moves it, because the GPU would hold it in fp32 first.
    """
    return not strategy_facts(config).divides_weights and not is_cast_by_deepspeed(config)


def is_cast_by_deepspeed(config: RunConfig) -> bool:
    """Whether all of a model, adapters too, is cast to 16 bits, in place of each product under torch's autocast.

    To fp16 it always is (`parallel.deepspeed` says why).
    """
    zero, compute = config.parallelism, config.precision.compute
    if not isinstance(zero, ZeroConfig) or compute is Compute.fp32:
        return False
    return compute is Compute.fp16 or zero.mixed_precision is MixedPrecision.cast


def mixes_formats(config: RunConfig) -> bool:
    """Whether fp32 weights are computed with in bf16 or fp16. bf16 weights have nothing left to mix."""
    precision = config.precision
    return precision.compute is not Compute.fp32 and precision.master_weights is not MasterWeights.bf16


def is_offloaded(config: RunConfig) -> bool:
    """Whether weights, optimizer states or activations live in host memory or on a disk."""
    settings = config.parallelism
    away = [config.activation.offload]
    if isinstance(settings, ZeroConfig):
        away += [settings.offload_optimizer is not Offload.none, settings.offload_parameters is not Offload.none]
    if isinstance(settings, FsdpConfig):
        away.append(settings.offload_parameters is not Offload.none)
    return any(away)
