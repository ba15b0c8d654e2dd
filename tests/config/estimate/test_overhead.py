"""What comes on top of tensors: the sum worked out by hand for each kind of run."""

from __future__ import annotations

import pytest

from tunebook.config.choices import Generation, Strategy
from tunebook.config.estimate.overhead import overhead_bytes
from tunebook.config.schema import FsdpConfig, ParallelismConfig

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


def test_a_process_on_a_cpu_is_python_and_its_libraries(sound):
    sound.parallelism, sound.hardware.gpus_per_node, sound.hardware.generation = DDP, 4, Generation.cpu
    assert overhead_bytes(sound, 40 * GIB) == 418 * MIB
