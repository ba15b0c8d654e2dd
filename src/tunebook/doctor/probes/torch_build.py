"""`python -m tunebook.doctor.probes.torch_build`: what torch was built for, and whether each GPU computes, as JSON."""

from __future__ import annotations

import json
import time
from typing import Any

_SIZE = 256
_GIB = 2**30


def read_torch() -> dict[str, Any]:
    """Version, CUDA, architectures, NCCL, and one entry per visible GPU; `cuda_problem` where none can be used."""
    import torch

    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "architectures": _architectures(torch),
        "nccl": _nccl(torch),
        "cuda_problem": None,
        "devices": [],
    }
    if torch.version.cuda is None:
        return facts
    try:
        torch.cuda.current_device()  # raises with the reason, where is_available() only says no
        facts["devices"] = [_compute(torch, index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        facts["cuda_problem"] = _first_line(error)
    return facts


def _architectures(torch: Any) -> list[str]:
    """The flags that torch was compiled with, which `get_arch_list` hides where there is no GPU."""
    ask = getattr(torch._C, "_cuda_getArchFlags", None)  # not in CPU builds
    flags = ask() if ask is not None else None
    return flags.split() if flags else []


def _nccl(torch: Any) -> str | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _compute(torch: Any, index: int) -> dict[str, Any]:
    """A product of whole numbers small enough to be exact in every format, so that one answer alone is right."""
    device = torch.device("cuda", index)
    facts: dict[str, Any] = {"index": index, "problem": None}
    try:
        start = time.perf_counter()
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        rows = torch.arange(_SIZE, dtype=torch.float32, device=device) % 5
        product = rows.repeat(_SIZE, 1) @ torch.eye(_SIZE, device=device)
        expected = (torch.arange(_SIZE, dtype=torch.float32) % 5).repeat(_SIZE, 1)
        if not torch.equal(product.cpu(), expected):
            facts["problem"] = "it computed a wrong product"
        facts |= {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "free_gib": round(free / _GIB, 2),
            "total_gib": round(total / _GIB, 2),
            "seconds": round(time.perf_counter() - start, 2),
        }
    except RuntimeError as error:  # torch's AcceleratorError and OutOfMemoryError are kinds of it
        facts["problem"] = _first_line(error)
    return facts


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    print(json.dumps(read_torch()))
