"""What a rank says when the memory of its GPU, or of the host, runs out: what filled it, and what takes less."""

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
from tunebook.record.files import PLAN_FILE
from tunebook.record.metrics import read_metrics

_GIB = 2**30
_OF_THE_HOST = "DefaultCPUAllocator"  # in torch's error for it


def memory_ran_out(folder: Path, error: BaseException) -> DoesNotFitError:
    """The error for a run in `folder` that an allocation has failed in; asks the GPU of this process, if it has one."""
    config, step = load_config(folder / "run.yaml"), _last_step(folder)
    when = f"after step {step}" if step else "before the first step was over"
    of_rank = f" of rank {os.environ['RANK']}" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    plan, is_on_cpu = _plan(folder), config.hardware.generation is Generation.cpu
    said, less = f"the memory of the host{of_rank} ran out {when}", _what_takes_less(config, plan)
    if not is_on_cpu and (isinstance(error, MemoryError) or _OF_THE_HOST in str(error)):
        less = "move less to it, or start fewer ranks on it: tunebook plan says what each host needs"
    elif not is_on_cpu:
        said = f"the GPU{of_rank} ran out of memory {when}"
        with suppress(RuntimeError):  # after an error of the driver's own it may answer nothing any more
            said += f": {_what_filled_it(plan)}"
    return DoesNotFitError(f"{said}; {less}", problem_id="memory-ran-out")


def _last_step(folder: Path) -> int | None:
    """The last that was logged; none where a damaged file says nothing about it."""
    with suppress(DataError):
        return max((int(line["step"]) for line in read_metrics(folder)), default=None)
    return None


def _what_filled_it(plan: dict[str, Any]) -> str:
    """Of a GPU whose last allocation failed. What others hold is not the plan's fault, nor a smaller pass's to mend."""
    free, whole = (number / _GIB for number in torch.cuda.mem_get_info())
    reserved, peak = torch.cuda.memory_reserved() / _GIB, torch.cuda.max_memory_allocated() / _GIB
    planned = (plan.get("memory_gib") or {}).get("allocated")  # of tensors, at the peak of a pass
    beside = "" if planned is None else f" where {planned:.1f} were planned"
    pieces = max(0.0, reserved - torch.cuda.memory_allocated() / _GIB)
    others = max(0.0, whole - free - reserved)
    return (
        f"tensors took up to {peak:.1f} of its {whole:.1f} GiB{beside}, {pieces:.1f} lay between them, and "
        f"{others:.1f} were held by CUDA's context, NCCL and other processes (nvidia-smi names those)"
    )


def _what_takes_less(config: RunConfig, plan: dict[str, Any]) -> str:
    """The cheapest change that leaves the optimizer steps as they are, which the plan could not know to be needed."""
    batch = plan.get("batch") or {}
    micro, passes = batch.get("micro"), batch.get("accumulation") or 1
    if micro is not None and micro > 1:
        less = max(number for number in range(1, micro) if micro * passes % number == 0)
        return f"take fewer rows in a pass: training.micro_batch_size={less} (now {micro})"
    if config.activation.checkpointing is not Checkpointing.enabled:
        return "keep less of a pass: activation=checkpointing"
    return "divide or move more: tunebook plan with --compare parallelism=zero3,fsdp,fsdp_offload says what would fit"


def _plan(folder: Path) -> dict[str, Any]:
    """What the run began with; nothing where it has none."""
    file = folder / PLAN_FILE
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found
