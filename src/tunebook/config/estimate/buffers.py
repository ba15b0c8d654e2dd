"""What a rank holds whole, or in another number format, while the backward pass begins."""

from __future__ import annotations

from tunebook.config.choices import Compute, MasterWeights, Offload, PeftMethod, Strategy
from tunebook.config.estimate.parameters import count_parameters
from tunebook.config.estimate.states import divided_among, weight_element
from tunebook.config.schema import FsdpConfig, ModelFacts, RunConfig, ZeroConfig

_BUCKETS_IN_ALL = 4.5


def buffer_bytes(config: RunConfig, facts: ModelFacts, *, is_recomputed: bool) -> float:
    """All of it, in bytes."""
    return _cast(config, facts, is_recomputed) + _gathered(config, facts) + bucket_bytes(config, facts)


def _cast(config: RunConfig, facts: ModelFacts, is_recomputed: bool) -> float:
    """Autocast's copies of the layers' weights, which the backward pass needs.

    With activation checkpointing they are there at the end of the forward pass, in autocast's cache, which holds
    nothing of frozen weights. FSDP gathers weights in bf16: there is nothing to copy.
    """
    is_mixed = config.precision.compute is not Compute.fp32 and weight_element(config) == 4
    if not is_mixed or config.precision.master_weights is MasterWeights.bf16:
        return 0.0
    if config.peft.method is PeftMethod.qlora or isinstance(config.parallelism, FsdpConfig):
        return 0.0  # four bits are widened for each product and not kept
    layers = count_parameters(config, facts).layers
    if is_recomputed and config.peft.method is not PeftMethod.full:
        layers //= max(1, facts.num_layers)  # one at a time
    return 2.0 * layers


def _gathered(config: RunConfig, facts: ModelFacts) -> float:
    """What is whole of a sharded or offloaded model: the embeddings and two layers, and the gradient of one layer."""
    settings = config.parallelism
    is_away = isinstance(settings, ZeroConfig | FsdpConfig) and settings.offload_parameters is not Offload.none
    if divided_among(config).weights == 1 and not is_away:
        return 0.0
    parameters = count_parameters(config, facts)
    embeddings = parameters.embeddings * (1 if facts.tie_word_embeddings else 2)
    layer = parameters.layers / max(1, facts.num_layers)
    gradients = layer if config.peft.method is PeftMethod.full else 0
    return (4 if config.precision.compute is Compute.fp32 else 2) * (embeddings + 2 * layer + gradients)


def bucket_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Gradients on their way: DDP's buckets, and those by which DeepSpeed moves gradients to the host."""
    ranks = max(1, config.hardware.num_nodes) * max(1, config.hardware.gpus_per_node or 1)
    settings, trained = config.parallelism, count_parameters(config, facts).trained
    if settings.strategy is Strategy.ddp and ranks > 1:
        return float(trained * weight_element(config))  # together they are as large as all gradients
    is_moved = isinstance(settings, ZeroConfig) and settings.offload_optimizer is not Offload.none
    if not is_moved or settings.strategy is Strategy.zero3:
        return 0.0
    bucket = settings.reduce_bucket_size or facts.hidden_size**2  # the Trainer's choice where nobody says
    # Two that take turns where communication overlaps, and what waits to be copied: in all 4.5 (DeepSpeed's
    # documentation of overlap_comm; 8.4 GiB measured for 5e8 elements on H200s), but no more than there are gradients.
    waiting = min(trained, (_BUCKETS_IN_ALL - 2) * bucket) if settings.overlap_comm else 0.0
    return weight_element(config) * ((2 if settings.overlap_comm else 1) * bucket + waiting)
