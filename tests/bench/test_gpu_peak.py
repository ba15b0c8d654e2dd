"""What filled a GPU at the peak of a step, from a trace of its allocator."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "gpu_turns"))
from gpu_peak import at_the_peak, origin

GIB = 2**30


def _frame(filename: str, line: int, name: str) -> dict[str, object]:
    return {"filename": filename, "line": line, "name": name}


def test_the_blocks_at_the_peak_are_told_by_size_and_origin() -> None:
    """3 GiB from before, of which one is given back; two of 2 GiB at the peak, and one of 1 GiB behind it."""
    asked = [_frame("/site/torch/nn/modules/module.py", 1, "call"), _frame("/site/llama/modeling.py", 7, "forward")]
    trace = [
        {"action": "free_requested", "addr": 1, "size": GIB},
        {"action": "alloc", "addr": 2, "size": 2 * GIB, "frames": asked},
        {"action": "alloc", "addr": 3, "size": 2 * GIB, "frames": asked},
        {"action": "free_requested", "addr": 2, "size": 2 * GIB},
        {"action": "alloc", "addr": 2, "size": GIB, "frames": []},
        {"action": "free_completed", "addr": 2, "size": GIB},
    ]
    found = at_the_peak(trace, allocated_after=5 * GIB)
    assert (found["peak_gib"], found["after_gib"], found["before the step"]) == (6.0, 5.0, 2.0)
    assert found["blocks"] == [{"gib": 4.0, "bytes": 2 * GIB, "count": 2, "asked": "llama/modeling.py:7 forward"}]


def test_an_origin_is_the_innermost_four_lines_without_torchs_dispatching() -> None:
    frames = [_frame(f"/a/b/{number}.py", number, "f") for number in range(6)]
    assert origin([_frame("/x/torch/_dynamo/eval_frame.py", 3, "g"), *frames]).count(" < ") == 3
    assert origin([]) == ""
