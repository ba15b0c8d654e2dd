"""The error of a rank that ran out of GPU or host memory: what used the memory, and what would need less."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tunebook.config.choices import Checkpointing, Generation
from tunebook.config.frozen import load_config
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError, DoesNotFitError
from tunebook.record.metrics import read_metrics
from tunebook.record.run_folder import PLAN_FILE

_GIB = 2**30
_OF_THE_HOST = "DefaultCPUAllocator"  # part of torch's error message for host memory


def memory_ran_out(folder: Path, error: BaseException) -> DoesNotFitError:
    """The error for a run in `folder` after a failed allocation, with the state of this process' GPU."""
    config, step = load_config(folder / "run.yaml"), _last_step(folder)
    when = f"after step {step}" if step else "before the first step was over"
    of_rank = f" of rank {os.environ['RANK']}" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    plan, is_on_cpu = _plan(folder), config.hardware.generation is Generation.cpu
    what, fix = f"the memory of the host{of_rank} ran out {when}", _smaller_setting(config, plan)
    if not is_on_cpu and (isinstance(error, MemoryError) or _OF_THE_HOST in str(error)):
        fix = "offload less to it, or start fewer ranks on it: tunebook plan shows what each host needs"
    elif not is_on_cpu:
        what = f"the GPU{of_rank} ran out of memory {when}"
        with suppress(RuntimeError):  # after such an error the driver may not answer
            what += f": {_gpu_usage(plan)}"
    return DoesNotFitError(f"{what}; {fix}", problem_id="memory-ran-out")


def _last_step(folder: Path) -> int | None:
    """The last logged step; None if there is none or the file is damaged."""
    with suppress(DataError):
        return max((int(line["step"]) for line in read_metrics(folder)), default=None)
    return None


def _gpu_usage(plan: dict[str, Any]) -> str:
    """What used the GPU's memory. A smaller pass does not reduce the memory of other processes."""
    free, whole = (number / _GIB for number in torch.cuda.mem_get_info())
    reserved, peak = torch.cuda.memory_reserved() / _GIB, torch.cuda.max_memory_allocated() / _GIB
    planned = (plan.get("memory_gib") or {}).get("allocated")  # by tensors, at the peak of a pass
    expected = "" if planned is None else f" where {planned:.1f} were planned"
    fragmented = max(0.0, reserved - torch.cuda.memory_allocated() / _GIB)
    others = max(0.0, whole - free - reserved)
    return (
        f"tensors took up to {peak:.1f} of its {whole:.1f} GiB{expected}, {fragmented:.1f} were lost to fragmentation, "
        f"and {others:.1f} were held by CUDA's context, NCCL and other processes (nvidia-smi lists those)"
    )


def _smaller_setting(config: RunConfig, plan: dict[str, Any]) -> str:
    """The cheapest change that saves memory and does not change the optimizer steps."""
    batch = plan.get("batch") or {}
    micro, passes = batch.get("micro"), batch.get("accumulation") or 1
    if micro is not None and micro > 1:
        less = max(number for number in range(1, micro) if micro * passes % number == 0)
        return f"use fewer rows in a pass: training.micro_batch_size={less} (now {micro})"
    if config.activation.checkpointing is not Checkpointing.enabled:
        return "keep fewer activations: activation=checkpointing"
    return (
        "keep fewer activations (activation.offload=true), shorten the rows, or shard or offload more: tunebook plan "
        "--compare parallelism=zero3,fsdp,fsdp_offload shows what would fit"
    )


def _plan(folder: Path) -> dict[str, Any]:
    """The run's plan; empty without one."""
    file = folder / PLAN_FILE
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found
