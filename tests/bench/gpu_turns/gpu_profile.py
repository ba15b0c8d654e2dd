"""Which kernels one optimizer step of a training spends its time in, as JSON."""

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
    "attention": r"flash|fmha|attention",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|_mm_",
    "optimizer": r"adam|multi_tensor",
    "communication": r"nccl",
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
        found = self._profiler.key_averages()
        self._profiler = None
        kernels = {event.key: (event.self_device_time_total / 1000, event.count) for event in found}
        self.file.write_text(json.dumps(summary(kernels, seconds), indent=1))


def summary(kernels: dict[str, tuple[float, int]], seconds: float) -> dict[str, Any]:
    """Milliseconds by kind, and the longest kernels with their milliseconds and how often they ran."""
    by_kind: dict[str, float] = defaultdict(float)
    for name, (milliseconds, _) in kernels.items():
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")
        by_kind[kind] += milliseconds
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:30]
    return {
        "step_ms": round(1000 * seconds, 1),
        "kernels_ms": round(sum(by_kind.values()), 1),
        "by_kind_ms": {kind: round(found, 1) for kind, found in sorted(by_kind.items(), key=lambda item: -item[1])},
        "longest": [[name[:120], round(milliseconds, 2), count] for name, (milliseconds, count) in longest],
    }
