"""Python reads this at its start where `gpu_evaluation` puts this folder on PYTHONPATH: what evaluations do on GPUs.

For every call of the harness one line of JSON goes to $TUNEBOOK_BENCH_CALLS: what was asked, the batch size that it
came to, seconds, and of each GPU what torch had allocated before, at most and afterwards, and how often it ran out.
$TUNEBOOK_BENCH_GPU_GIB makes every GPU as small as that, for the choice where a model is put and for torch's allocator:
what is larger fails as it would on such a card.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_GIB = 2**30


def _note_calls(module: Any) -> None:
    """Write a line for every call of `RequestModel.answer_alone`."""
    answer_alone = module.RequestModel.answer_alone

    def noted(self: Any, kind: str, requests: Sequence[Any]) -> Any:
        torch = module.torch
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
        before = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
        failures = [torch.cuda.memory_stats(gpu).get("num_ooms", 0) for gpu in gpus]
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        started = time.monotonic()
        try:
            return answer_alone(self, kind, requests)
        finally:
            stats = [torch.cuda.memory_stats(gpu) for gpu in gpus]
            line = {
                "process": os.getpid(),
                "kind": kind,
                "requests": len(requests),
                "batch_size": self.batch_size_per_gpu,
                "seconds": round(time.monotonic() - started, 2),
                "allocated_before_gib": [_gib(found) for found in before],
                "peak_gib": [_gib(torch.cuda.max_memory_allocated(gpu)) for gpu in gpus],
                "allocated_after_gib": [_gib(torch.cuda.memory_allocated(gpu)) for gpu in gpus],
                "reserved_after_gib": [_gib(torch.cuda.memory_reserved(gpu)) for gpu in gpus],
                "host_peak_gib": _gib(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss),
                "out_of_memory": [s.get("num_ooms", 0) - n for s, n in zip(stats, failures, strict=True)],
                "parameters_on": dict(Counter(str(p.device) for p in self.model.parameters())),
                "formats": dict(Counter(str(p.dtype) for p in self.model.parameters())),
            }
            with Path(os.environ["TUNEBOOK_BENCH_CALLS"]).open("a") as file:
                file.write(json.dumps(line) + "\n")

    module.RequestModel.answer_alone = noted


def _limit_allocator(module: Any) -> None:
    """Make torch refuse more than the limit, before the model is loaded."""
    load = module._load

    def limited(*arguments: Any, **options: Any) -> Any:
        import torch

        limit = float(os.environ["TUNEBOOK_BENCH_GPU_GIB"]) * _GIB
        for gpu in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            share = limit / torch.cuda.get_device_properties(gpu).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), gpu)
        return load(*arguments, **options)

    module._load = limited


def _show_small_gpus(module: Any) -> None:
    """Let the choice where a model is put see GPUs of the limit's size."""
    detect = module.detect_machine

    def smaller(*arguments: Any, **options: Any) -> Any:
        machine = detect(*arguments, **options)
        limit = float(os.environ["TUNEBOOK_BENCH_GPU_GIB"])
        gpus = [dataclasses.replace(gpu, memory_gib=min(limit, gpu.memory_gib)) for gpu in machine.gpus]
        return dataclasses.replace(machine, gpus=gpus)

    module.detect_machine = smaller


def _gib(size: float) -> float:
    return round(size / _GIB, 4)


class _Patched(importlib.abc.MetaPathFinder):
    """Finds modules where they are, and changes each once it is loaded."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        loader: Any = spec.loader if spec else None
        execute = loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            self._changes[fullname](module)

        loader.exec_module = execute_and_change
        return spec


def _run_the_other() -> None:
    """An environment may have a sitecustomize of its own, which this one hides."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_the_other()
if "TUNEBOOK_BENCH_CALLS" in os.environ:
    _changes: dict[str, Callable[[Any], None]] = {"tunebook.evaluate.request_model": _note_calls}
    if "TUNEBOOK_BENCH_GPU_GIB" in os.environ:
        _changes["tunebook.evaluate.evaluation"] = _limit_allocator
        _changes["tunebook.evaluate.worker"] = _show_small_gpus
    sys.meta_path.insert(0, _Patched(_changes))
