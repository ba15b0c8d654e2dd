"""What fills a GPU at the peak of optimizer steps, as JSON: the blocks that were there, by who asked for them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

STEP = 3  # by then the optimizer has its state; with $TUNEBOOK_BENCH_PEAK_STEPS others
_LONGEST = 30  # groups of blocks
_OLD = "before the step"


class PeakOfSteps(TrainerCallback):
    """Records the allocator's doings from the first to the last step and writes what was there at their peak to a file.

    `has_origins`: with the lines of Python that asked, which not every run survives (torch 2.11: compiled layers that
    activation checkpointing computes again).
    """

    def __init__(self, file: Path, first: int, last: int, *, has_origins: bool = True) -> None:
        self.file, self.first, self.last, self.has_origins = file, first, last, has_origins
        if first == 1:
            self._begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with the first step; step 1 has what is done before it, too."""
        if state.global_step + 1 == self.first > 1:
            self._begin()

    def _begin(self) -> None:
        import torch

        torch.cuda.synchronize()
        context = "all" if self.has_origins else None
        torch.cuda.memory._record_memory_history(context=context, max_entries=4_000_000, stacks="python")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End with it and write."""
        if state.global_step != self.last:
            return
        import torch

        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        events = snapshot["device_traces"][torch.cuda.current_device()]
        whole = torch.cuda.memory_allocated()
        self.file.write_text(json.dumps(at_the_peak(events, whole), indent=0))


def at_the_peak(events: list[dict[str, Any]], allocated_after: int) -> dict[str, Any]:
    """The bytes at the peak of a trace, and the blocks that were alive then, those of one size and origin together."""
    there: dict[int, tuple[int, str]] = {}
    total, best, best_index = 0, 0, -1
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            there[event["addr"]] = (event["size"], "")
            total += event["size"]
        elif event["action"] == "free_requested":
            there.pop(event["addr"], None)
            total -= event["size"]
        if total > best:
            best, best_index = total, index
    before = allocated_after - total  # of what nobody in the trace allocated
    groups: dict[tuple[int, str], int] = defaultdict(int)
    there.clear()
    old = before
    for event in events[: best_index + 1]:
        if event["action"] == "alloc":
            there[event["addr"]] = (event["size"], origin(event.get("frames") or []))
        elif event["action"] == "free_requested" and there.pop(event["addr"], None) is None:
            old -= event["size"]
    for size, asked in there.values():
        groups[size, asked] += 1
    by_size = sorted(groups.items(), key=lambda group: -group[0][0] * group[1])
    return {
        "peak_gib": round((before + best) / 2**30, 3),
        "after_gib": round(allocated_after / 2**30, 3),
        _OLD: round(old / 2**30, 3),
        "share_of_the_step_gone": round(best_index / max(1, len(events)), 3),
        "blocks": [
            {"gib": round(size * count / 2**30, 3), "bytes": size, "count": count, "asked": asked}
            for (size, asked), count in by_size[:_LONGEST]
        ],
        "others_gib": round(sum(size * count for (size, _), count in by_size[_LONGEST:]) / 2**30, 3),
    }


def origin(frames: Iterable[dict[str, Any]]) -> str:
    """The innermost lines of Python that led to an allocation, without torch's own dispatching."""
    lines = []
    for frame in frames:
        name = frame["filename"]
        if any(part in name for part in ("torch/nn/modules/module", "torch/_dynamo", "contextlib", "torch/utils/_")):
            continue
        lines.append(f"{'/'.join(name.split('/')[-2:])}:{frame['line']} {frame['name']}")
        if len(lines) == 4:
            break
    return " < ".join(lines)
