"""Recognize errors that mean too little memory."""

from __future__ import annotations

import torch

# What accelerate does not know. The driver's own error names neither the size nor the allocator.
_MESSAGES = (
    "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'",  # NCCL's, newer and older
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """True if torch ran out of GPU or host memory. torch, its libraries and the driver have different errors."""
    from accelerate.utils.memory import should_reduce_batch_size

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return should_reduce_batch_size(error) or any(message in str(error) for message in _MESSAGES)
