"""Callbacks of benchmarked runs: the kernels of one optimizer step as JSON, and a correction of torch 2.11."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

STEP = 8  # the optimizer step that is looked at, once everything is compiled and the allocator has settled
# The first pattern that a kernel's name matches says what it is.
KINDS = {
    "communication": r"nccl",
    "attention": r"flash|fmha|attention",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|_mm_",
    "optimizer": r"adam|multi_tensor",
    "loss": r"_forward_kernel|_backward_kernel|logprob|entropy|softmax",
    "compiled": r"triton",
    "copies": r"memcpy|memset|copy",
    "elementwise": r"elementwise|vectorized|reduce|cat|index|fill",
}


class OneStep(TrainerCallback):
    """Profiles one optimizer step and writes milliseconds by kind of kernel, and of the longest kernels, to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._profiler: Any = None
        self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with the step."""
        if state.global_step + 1 == STEP:
            import torch

            torch.cuda.synchronize()
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.__enter__()
            self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End with it and write."""
        if self._profiler is None:
            return
        import torch

        torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        self._profiler.__exit__(None, None, None)
        kernels = [
            (event.name, event.time_range.start / 1000, event.time_range.end / 1000)
            for event in self._profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        self._profiler = None
        self.file.write_text(json.dumps(summary(kernels, seconds), indent=1))


def summary(kernels: list[tuple[str, float, float]], seconds: float) -> dict[str, Any]:
    """Milliseconds by kind, and the longest kernels with their milliseconds and how often they ran.

    `kernels` are names with milliseconds of their start and end. They may overlap: how long any but those of the
    communication were at work, and how long only those of the communication were, is counted on the clock.
    """
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    computing = []
    for name, start, end in kernels:
        kind = kind_of(name)
        by_kind[kind] += end - start
        by_name[name] = (by_name[name][0] + end - start, by_name[name][1] + 1)
        if kind != "communication":
            computing.append((start, end))
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:30]
    computed_ms = covered(computing)
    return {
        "step_ms": round(1000 * seconds, 1),
        "kernels_ms": round(sum(by_kind.values()), 1),
        "computing_ms": round(computed_ms, 1),
        "only_communicating_ms": round(covered([(start, end) for _, start, end in kernels]) - computed_ms, 1),
        "by_kind_ms": {kind: round(found, 1) for kind, found in sorted(by_kind.items(), key=lambda item: -item[1])},
        "longest": [[name[:120], round(milliseconds, 2), count] for name, (milliseconds, count) in longest],
        "idle_ms": round(1000 * seconds - covered([(start, end) for _, start, end in kernels]), 1),
        "longest_idle": [
            [round(milliseconds, 2), before[:60], after[:60]] for milliseconds, before, after in longest_idle(kernels)
        ],
    }


def longest_idle(kernels: list[tuple[str, float, float]], at_most: int = 30) -> list[tuple[float, str, str]]:
    """The longest spans in which no kernel was at work, in milliseconds, with the kernels before and after each."""
    found, reached, last = [], float("inf"), ""
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        if start > reached:
            found.append((start - reached, last, name))
        if end > reached or reached == float("inf"):
            reached, last = end, name
    return sorted(found, reverse=True)[:at_most]


def kind_of(name: str) -> str:
    """The kind of work that a kernel's name tells."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def covered(spans: list[tuple[float, float]]) -> float:
    """How much of the clock at least one of the spans covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class EndOfPasses(TrainerCallback):
    """Ends what FSDP's pass without gradients began: torch 2.11 leaves that to the next pass, torch 2.13 does not.

    Add it after the leak probe. A unit may have a module that is not called, as TRL's fused head never calls the head.
    Torch 2.11 then takes the next pass for the rest of that one, and reduces the head's gradient after all others: 7.4
    GiB instead of 5.3 for 6 layers of Qwen3-8B in fp32, which no later step needs (two H100).
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Of all units, once all ranks have been through the probe."""
        for unit in self.trainer.model_wrapped._get_fsdp_state()._state_ctx.all_states:
            unit._modules_to_run_forward.clear()
