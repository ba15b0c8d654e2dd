"""Callbacks of benchmarked runs: host memory, kernels and memory of one step, and a correction of torch 2.11."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import turns
from transformers import TrainerCallback

PROFILED_STEP = 8  # everything is compiled by then, and the allocator has settled
TRACED_STEP = 3  # by then the optimizer has its state
_RANK = os.environ.get("RANK", "0")


def callbacks(trainer: Any) -> list[TrainerCallback]:
    """Those that the environment asks for."""
    found: list[TrainerCallback] = [HostMemory(), Turn()]
    if _RANK == "0" and (name := os.environ.get("TUNEBOOK_BENCH_PROFILE")):
        found.append(Kernels(name))
    if _RANK == "0" and (name := os.environ.get("TUNEBOOK_BENCH_MEMORY")):
        found.append(GpuMemory(name))
    if getattr(trainer, "is_fsdp_enabled", False):
        found.append(EndOfPasses(trainer))
    return found


class HostMemory(TrainerCallback):
    """Writes the process's memory at the end of training and at its peak, and PyTorch's page-locked blocks, in GiB."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write them for `gpu_queue.py`."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        now, peak = (round(int(status[name].split()[0]) / 2**20, 3) for name in ("VmRSS", "VmHWM"))
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) if torch.cuda.is_available() else 0
        found = {"host_gib": now, "host_peak_gib": peak, "host_pinned_gib": round(pinned / 2**30, 3)}
        (Path(os.environ[turns.FOLDER]) / f"host-{_RANK}").write_text(json.dumps(found))


class Turn(TrainerCallback):
    """Waits to be timed."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait."""
        turns.end_of_step(state.global_step)


class Kernels(TrainerCallback):
    """Profiles one optimizer step: a table of its kernels by time, and a trace for chrome://tracing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.profiler: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with the step."""
        if state.global_step + 1 == PROFILED_STEP:
            torch.cuda.synchronize()
            self.profiler = torch.profiler.profile()
            self.profiler.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End with it and write."""
        if state.global_step == PROFILED_STEP:
            torch.cuda.synchronize()
            self.profiler.stop()
            table = self.profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=60)
            Path(f"{self.name}.kernels.txt").write_text(table)
            self.profiler.export_chrome_trace(f"{self.name}.trace.json.gz")


class GpuMemory(TrainerCallback):
    """Records every allocation of one optimizer step, with the lines of Python that asked."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with the step."""
        if state.global_step + 1 == TRACED_STEP:
            torch.cuda.memory._record_memory_history(max_entries=4_000_000, stacks="python")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End with it and write."""
        if state.global_step == TRACED_STEP:
            torch.cuda.memory._dump_snapshot(f"{self.name}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)


class EndOfPasses(TrainerCallback):
    """Ends what FSDP's pass without gradients began: torch 2.11 leaves that to the next pass, torch 2.13 does not.

    The leak probe's pass never calls the head, since TRL's fused loss does not. Torch 2.11 then takes the next pass for
    the rest of that one, and reduces the head's gradient after all others: 7.4 GiB instead of 5.3 for 6 layers of
    Qwen3-8B in fp32, which no later step needs (two H100).
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Of all units, once all ranks have been through the probe."""
        for unit in self.trainer.model_wrapped._get_fsdp_state()._state_ctx.all_states:
            unit._modules_to_run_forward.clear()
