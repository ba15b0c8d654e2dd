"""Which GPUs belong together, and how CUDA is told to show these alone."""

from __future__ import annotations

import pytest

from tunebook.config.choices import Generation
from tunebook.hardware.detect import Gpu
from tunebook.hardware.visible import equal_gpus, visible_only

# name: compute capability, GiB
KINDS = {
    "A100": ((8, 0), 80.0), "Display": ((7, 5), 4.0), "4090": ((8, 9), 24.0), "3060": ((8, 6), 12.0),
    "T4": ((7, 5), 16.0), "RTX 8000": ((7, 5), 48.0), "K80": ((3, 7), 12.0),
}  # fmt: skip


def gpus_of(*names: str, has_ids: bool = True) -> list[Gpu]:
    return [
        Gpu(
            name=name,
            memory_gib=KINDS[name][1],
            compute_capability=KINDS[name][0],
            generation=Generation.ampere,
            index=index,
            uuid=f"GPU-{index:02}" if has_ids else "",
        )
        for index, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["A100", "A100", "A100", "Display", "A100"], [0, 1, 2, 4]),  # a DGX Station
        (["3060", "4090"], [1]),
        (["4090", "3060"], [0]),
        (["4090", "3060", "3060"], [1, 2]),
        (["T4", "RTX 8000"], [1]),  # of the same age
        (["K80", "K80", "T4"], [2]),  # torch has no code for the others
        (["K80"], [0]),
        ([], []),
    ],
)
def test_the_largest_group_of_equal_gpus_then_the_best(names: list[str], expected: list[int]) -> None:
    assert [gpu.index for gpu in equal_gpus(gpus_of(*names))] == expected


def test_gpus_are_named_by_their_ids_since_cuda_counts_in_another_order() -> None:
    assert visible_only(gpus_of("3060", "4090")[1:]) == "CUDA_VISIBLE_DEVICES=GPU-01"
    assert visible_only(gpus_of("A100", "A100", has_ids=False)) == "CUDA_VISIBLE_DEVICES=0,1"
