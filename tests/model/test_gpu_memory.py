from __future__ import annotations

import pytest
import torch

from tunebook.model.gpu_memory import is_out_of_memory


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the manual"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.distributed.DistBackendError("NCCL error: Last error:\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
    ids=["cuda", "cpu", "python", "driver", "cublas", "nccl", "illegal", "other"],
)
def test_errors_that_mean_too_little_memory(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory
