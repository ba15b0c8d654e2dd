"""What a rank's device is filled with besides tensors: contexts of CUDA and NCCL, and pieces that the allocator holds.

The allocator's share is measured; the contexts are others' figures, since on the GPUs of the measurements more than one
run had a context. This part is shown and added up; it can only make a run not fit that by its tensors would.
Runs write down what it really was: `memory_reserved_gib` and `memory_device_gib` of `metrics.jsonl`.
"""

from __future__ import annotations

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig
from tunebook.facts.strategies import strategy_facts
from tunebook.plan.memory.states import num_ranks

MIB = 2**20
# The CUDA context with torch's libraries: 781 MiB before the first tensor (pytorch#34323). Newer CUDA loads kernels
# when they are first called, so it starts smaller and grows to about this.
CUDA_CONTEXT = 781 * MIB
# One NCCL communicator's buffers: 544 MiB between 2 GPUs, 688 MiB between more, on 4 A100 with NVLink (nccl#964). Links
# with more channels take more: with CUDA's context 1.06 GB on 8 H100 (nccl#1685), about the sum of the two here.
NCCL_OF_TWO, NCCL_OF_MORE = 544 * MIB, 688 * MIB
# Measured on H200s (tests/bench/results/h200_memory.jsonl): the allocator holds this share more than tensors take, in
# pieces too small for what is asked for next. 27 runs on one GPU or with DDP: 1% to 18%, median 7%. 17 that divide the
# states or move them to the host, and so allocate at other sizes every time: 2% to 51%, median 20%. 21 with FSDP: 5% to
# 50%, median 18%, and 5% to 7% where the GPU was nearly full, since it then gives back what it does not use.
ALLOCATOR_SHARE, ALLOCATOR_SHARE_DIVIDED, ALLOCATOR_SHARE_FSDP = 0.10, 0.22, 0.18
ALLOCATOR_SHARE_OF_A_FULL_GPU = 0.07
# Measured: the resident memory of a rank that has imported everything and joined the others, before it loads a model
# (tests/bench/results/loading_memory.jsonl, a CPU build of torch 2.13: 417.7 to 418.4 MiB).
PROCESS = 418 * MIB


def overhead_bytes(config: RunConfig, tensors: float, capacity: float | None = None) -> float:
    """What comes on top of a peak of so many bytes of tensors on one GPU, or in one process on a CPU.

    On a GPU of `capacity` bytes the allocator holds what is left at most, where that is enough for a full one.
    """
    if config.hardware.generation is Generation.cpu:
        return float(PROCESS)
    facts = strategy_facts(config)
    share = ALLOCATOR_SHARE if facts.is_copied else ALLOCATOR_SHARE_DIVIDED
    share = ALLOCATOR_SHARE_FSDP if facts.is_fsdp and facts.gathers_each_layer else share
    contexts = float(CUDA_CONTEXT + sum(map(_communicator, _groups(config))))
    if capacity is None:
        return contexts + share * tensors
    left = capacity - contexts - tensors
    return contexts + min(share * tensors, max(ALLOCATOR_SHARE_OF_A_FULL_GPU * tensors, left))


def _groups(config: RunConfig) -> list[int]:
    """The sizes of the groups of GPUs that a rank talks to: all of them, and hsdp's two."""
    hardware = config.hardware
    world = num_ranks(config)
    if not strategy_facts(config).within_groups:
        return [world]
    group = getattr(config.parallelism, "shard_group_size", None) or hardware.gpus_per_node or 1
    return [world, group, max(1, world // max(1, group))]


def _communicator(size: int) -> int:
    if size < 2:
        return 0
    return NCCL_OF_TWO if size == 2 else NCCL_OF_MORE
