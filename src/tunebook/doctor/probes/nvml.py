"""`python -m tunebook.doctor.probes.nvml`: the health of every GPU as NVML tells it, as JSON.

`{"gpus": [...]}`; a question that a model or driver does not answer is null. Where there is no NVML or no driver the
list is empty: `hardware.detect` says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}  # nvmlComputeMode_t
_VOLATILE, _AGGREGATE, _UNCORRECTED = 0, 1, 1  # nvmlEccCounterType_t, nvmlMemoryErrorType_t
_GIB = 2**30


def read_health() -> list[dict[str, Any]]:
    """What NVML says of each GPU, in the order of the PCI bus; a GPU that does not answer has `problem`."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_read_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int) -> dict[str, Any]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return {"index": index, "problem": str(error)}

    def asked(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except nvml.NVMLError:
            return None

    memory = asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    mode = asked(lambda: nvml.nvmlDeviceGetComputeMode(handle))
    return {
        "index": index,
        "problem": None,
        "used_gib": round(memory.used / _GIB, 2) if memory else None,
        "total_gib": round(memory.total / _GIB, 2) if memory else None,
        "processes": asked(lambda: _processes(nvml, handle)),
        "persistence": asked(lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle))),
        "compute_mode": _COMPUTE_MODES.get(mode, str(mode)) if mode is not None else None,
        "mig": asked(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0])),
        "ecc": asked(lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0])),
        "uncorrected_since_start": asked(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _VOLATILE)),
        "uncorrected_ever": asked(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _AGGREGATE)),
        "remapping": asked(lambda: _remapping(nvml, handle)),
        "retirement_pending": asked(lambda: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))),
        "pcie_width": asked(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "pcie_max_width": asked(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    }


def _processes(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    """The processes that compute on a GPU; from inside a container those of others are not seen."""
    return [
        {
            "pid": process.pid,
            "gib": None if process.usedGpuMemory is None else round(process.usedGpuMemory / _GIB, 2),
        }
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    ]


def _remapping(nvml: Any, handle: Any) -> dict[str, Any]:
    """Rows of memory that were replaced by spare ones (Ampere and newer)."""
    correctable, uncorrectable, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
    return {
        "correctable": correctable,
        "uncorrectable": uncorrectable,
        "is_pending": bool(is_pending),
        "has_failed": bool(has_failed),
    }


if __name__ == "__main__":
    print(json.dumps({"gpus": read_health()}))
