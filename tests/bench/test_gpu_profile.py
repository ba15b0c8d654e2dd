"""What one step's kernels are summed up to."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "gpu_turns"))
from gpu_profile import covered, kind_of, longest_idle, summary


def test_covered_counts_overlapping_spans_once() -> None:
    """[0, 4] and [2, 6] cover 6; [7, 8] one more; a span inside another nothing."""
    assert covered([(7.0, 8.0), (0.0, 4.0), (2.0, 6.0), (3.0, 4.0)]) == 7.0


def test_communication_that_nothing_hides_is_told_apart() -> None:
    """A product from 0 to 6 ms; messages from 4 to 9 and from 1 to 2 ms: 3 of their 6 ms are not hidden."""
    kernels = [
        ("nvjet_sm90_tst", 0.0, 6.0),
        ("ncclDevKernel_AllGather_RING_LL", 4.0, 9.0),
        ("ncclDevKernel_AllGather_RING_LL", 1.0, 2.0),
    ]
    found = summary(kernels, 0.010)
    assert (found["step_ms"], found["kernels_ms"]) == (10.0, 12.0)
    assert (found["computing_ms"], found["only_communicating_ms"]) == (6.0, 3.0)
    assert found["by_kind_ms"] == {"products": 6.0, "communication": 6.0}
    assert ["ncclDevKernel_AllGather_RING_LL", 6.0, 2] in found["longest"]


def test_idle_spans_are_told_with_what_ran_before_and_after_them() -> None:
    """Nothing ran from 6 to 7 and from 9 to 12 ms; a kernel inside another ends no span."""
    kernels = [("d", 12.0, 13.0), ("a", 0.0, 6.0), ("inside", 1.0, 2.0), ("b", 7.0, 9.0), ("at once", 9.0, 9.0)]
    assert longest_idle(kernels) == [(3.0, "b", "d"), (1.0, "a", "b")]
    assert longest_idle(kernels, at_most=1) == [(3.0, "b", "d")]
    found = summary(kernels, 0.014)
    assert (found["idle_ms"], found["longest_idle"]) == (5.0, [[3.0, "b", "d"], [1.0, "a", "b"]])


def test_copies_between_gpus_are_communication() -> None:
    """NCCL's kernels may have the name of what they do in it."""
    assert kind_of("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL") == "communication"
    assert kind_of("void pytorch_flash::flash_fwd_kernel") == "attention"
