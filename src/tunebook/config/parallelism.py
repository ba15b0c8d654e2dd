"""The settings of the group `parallelism`, by strategy."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from tunebook.config.choices import MixedPrecision, Offload, Strategy
from tunebook.config.ranges import number


@dataclass(kw_only=True)
class ParallelismConfig:
    """How the model is spread over the GPUs."""

    strategy: Strategy = MISSING  # how the model is distributed; auto: the fastest that is estimated to fit
    # GPUs of a node that share each row, every one with an equal part of its tokens, for rows that one cannot hold
    sequence_group_size: int = number(1, at_least=1, unit="GPUs")


@dataclass(kw_only=True)
class ZeroConfig(ParallelismConfig):
    """DeepSpeed ZeRO. Null leaves a setting at DeepSpeed's default, or where it says so at the Trainer's choice."""

    offload_optimizer: Offload = Offload.none  # where optimizer states are kept; none: on the GPU
    offload_parameters: Offload = Offload.none  # zero3: where parameters are kept; none: on the GPU
    nvme_path: str | None = None  # a folder on a local NVMe disk, for what is offloaded to nvme
    overlap_comm: bool | None = None  # hides communication behind the backward pass for 4.5 x the bucket sizes
    allgather_bucket_size: int | None = number(None, at_least=1, unit="elements")  # elements gathered at once
    # Elements reduced at once; null: hidden_size squared, by the Trainer
    reduce_bucket_size: int | None = number(None, at_least=1, unit="elements")
    round_robin_gradients: bool | None = None  # spreads the copying of gradients to the CPU over the ranks
    pin_memory: bool | None = None  # page-locked host memory for offloaded states: faster, not swappable
    # zero3: parameters that may be whole on the GPU at any time
    max_live_parameters: int | None = number(None, at_least=0, unit="parameters")
    # zero3: a parameter that is used again within this many is kept
    max_reuse_distance: int | None = number(None, at_least=0, unit="parameters")
    # zero3: elements fetched ahead; null: by the Trainer from hidden_size
    prefetch_bucket_size: int | None = number(None, at_least=0, unit="elements")
    # zero3: smaller parameters stay whole; null: by the Trainer
    param_persistence_threshold: int | None = number(None, at_least=0, unit="elements")
    # zero3: elements the optimizer updates at once
    sub_group_size: int | None = number(None, at_least=1, unit="elements")
    # bf16 only. autocast: as single and ddp compute. cast, DeepSpeed's own way, is faster and takes less memory, but
    # starts from rounded weights and loses updates smaller than the rounding
    mixed_precision: MixedPrecision = MixedPrecision.autocast


@dataclass(kw_only=True)
class FsdpConfig(ParallelismConfig):
    """PyTorch FSDP2 (`fully_shard`) through accelerate."""

    offload_parameters: Offload = Offload.none  # cpu: parameters, gradients and the optimizer step on the host
    # Classes of modules that are sharded as one unit; empty: the model's own `_no_split_modules`
    wrap_classes: list[str] = field(default_factory=list)
    cpu_ram_efficient_loading: bool = True  # one rank reads the weights, the others start empty
    # hsdp: GPUs that hold one whole model together; null: those of one node
    shard_group_size: int | None = number(None, at_least=1, unit="GPUs")
    # bf16 only. autocast: sums between layers stay in fp32, as in single and ddp. cast: all is bf16, for less memory
    mixed_precision: MixedPrecision = MixedPrecision.autocast
