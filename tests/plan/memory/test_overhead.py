"""What comes on top of tensors: the sum worked out by hand for each kind of run."""

from __future__ import annotations

import pytest

from tunebook.config.choices import Generation, Strategy
from tunebook.config.schema import FsdpConfig, ParallelismConfig
from tunebook.plan.memory.overhead import overhead_bytes

MIB, GIB = 2**20, 2**30
DDP = ParallelismConfig(strategy=Strategy.ddp)


@pytest.mark.parametrize(
    ("settings", "nodes", "gpus", "mib"),
    [
        (ParallelismConfig(strategy=Strategy.single), 1, 1, 781),
        (DDP, 1, 1, 781),
        (DDP, 1, 2, 781 + 544),
        (DDP, 1, 8, 781 + 688),
        (DDP, 2, 1, 781 + 544),
        (FsdpConfig(strategy=Strategy.fsdp), 4, 8, 781 + 688),
        (FsdpConfig(strategy=Strategy.hsdp), 2, 8, 781 + 688 + 688 + 544),  # all 16, the 8 of a node, the 2 copies
        (FsdpConfig(strategy=Strategy.hsdp, shard_group_size=2), 1, 4, 781 + 688 + 544 + 544),
    ],
)
def test_contexts_communicators_and_slack(sound, settings, nodes, gpus, mib):
    sound.parallelism, sound.hardware.num_nodes, sound.hardware.gpus_per_node = settings, nodes, gpus
    assert overhead_bytes(sound, 0) == mib * MIB
    slack = {Strategy.fsdp: 7.2, Strategy.hsdp: 8.8}.get(settings.strategy, 4)
    assert overhead_bytes(sound, 40 * GIB) == pytest.approx(mib * MIB + slack * GIB)


def test_on_a_nearly_full_gpu_the_allocator_holds_what_is_left_and_on_a_full_one_7_percent(sound):
    """30 GiB of tensors with FSDP, whose allocator holds 18% where there is room, and 1.435 GiB of contexts."""
    sound.parallelism = FsdpConfig(strategy=Strategy.fsdp)
    sound.hardware.num_nodes, sound.hardware.gpus_per_node = 1, 8
    contexts = (781 + 688) / 1024
    held = {room: overhead_bytes(sound, 30 * GIB, room * GIB) / GIB - contexts for room in (80, 35, 33)}
    assert held == {80: pytest.approx(5.4), 35: pytest.approx(5 - contexts), 33: pytest.approx(2.1)}


def test_a_process_on_a_cpu_is_python_and_its_libraries(sound):
    sound.parallelism, sound.hardware.gpus_per_node, sound.hardware.generation = DDP, 4, Generation.cpu
    assert overhead_bytes(sound, 40 * GIB) == 418 * MIB
