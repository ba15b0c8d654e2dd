"""Memory of a rank's device besides tensors: CUDA and NCCL contexts, and the allocator's fragmentation.

The allocator's share is measured. The contexts are published figures, because the measured GPUs held contexts of more
than one run. The overhead is shown and added to the total; it can only turn a fitting plan into one that does not fit.
Runs record the actual values: `memory_reserved_gib` and `memory_device_gib` of `metrics.jsonl`.
"""

from __future__ import annotations

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig, world_size
from tunebook.facts.strategies import strategy_facts

MIB = 2**20
# The CUDA context with torch's libraries: 781 MiB before the first tensor (pytorch#34323). Newer CUDA loads kernels on
# first use, so its context starts smaller and grows to about this size.
CUDA_CONTEXT = 781 * MIB
# One NCCL communicator's buffers: 544 MiB between 2 GPUs, 688 MiB between more, on 4 A100 with NVLink (nccl#964). Links
# with more channels need more: 1.06 GB with CUDA's context on 8 H100 (nccl#1685), about the sum of the two here.
NCCL_TWO_GPUS, NCCL_MORE_GPUS = 544 * MIB, 688 * MIB
# Measured on H200s (benchmarks/results/h200_memory.jsonl): the allocator reserves this share more than the tensors, in
# blocks too small for the next requests. 27 runs on one GPU or with DDP: 1% to 18%, median 7%. 17 runs that divide the
# states or offload them to the host, and so allocate varying sizes: 2% to 51%, median 20%. 21 runs with FSDP: 5% to
# 50%, median 18%, and 5% to 7% if the GPU was nearly full, since the allocator then frees unused blocks.
ALLOCATOR_SHARE, ALLOCATOR_SHARE_DIVIDED, ALLOCATOR_SHARE_FSDP = 0.10, 0.22, 0.18
ALLOCATOR_SHARE_FULL_GPU = 0.07
# Measured: the resident memory of a rank after all imports and the rendezvous, before it loads a model
# (benchmarks/results/loading_memory.jsonl, a CPU build of torch 2.13: 417.7 to 418.4 MiB).
PROCESS_BYTES = 418 * MIB


def overhead_bytes(config: RunConfig, tensors: float, capacity: float | None = None) -> float:
    """Overhead for a peak of `tensors` bytes on one GPU, or in one process on a CPU.

    On a GPU of `capacity` bytes, the allocator holds at most the remaining memory, if that is enough for a full GPU.
    """
    if config.hardware.generation is Generation.cpu:
        return float(PROCESS_BYTES)
    facts = strategy_facts(config)
    share = ALLOCATOR_SHARE if facts.is_copied else ALLOCATOR_SHARE_DIVIDED
    share = ALLOCATOR_SHARE_FSDP if facts.is_fsdp and facts.gathers_each_layer else share
    contexts = float(CUDA_CONTEXT + sum(map(_communicator, _groups(config))))
    if capacity is None:
        return contexts + share * tensors
    left = capacity - contexts - tensors
    return contexts + min(share * tensors, max(ALLOCATOR_SHARE_FULL_GPU * tensors, left))


def _groups(config: RunConfig) -> list[int]:
    """Sizes of a rank's communication groups: all ranks, hsdp's two groups, and a sequence group."""
    hardware = config.hardware
    world, sequence = world_size(config), config.parallelism.sequence_group_size
    if not strategy_facts(config).within_groups:
        return [world, sequence]
    group = getattr(config.parallelism, "shard_group_size", None) or hardware.gpus_per_node or 1
    return [world, group, max(1, world // max(1, group)), sequence]


def _communicator(size: int) -> int:
    if size < 2:
        return 0
    return NCCL_TWO_GPUS if size == 2 else NCCL_MORE_GPUS
