"""The GPU for a model of a given size. 10 GiB of memory hold (10 - 0.5) / 1.1 = 8.63 GiB of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tunebook.errors import DoesNotFitError
from tunebook.model.gpu_memory import GIB, Placement, choose_placement, is_out_of_memory, place_on_gpus

ONE, SEVERAL = False, True


@pytest.mark.parametrize(
    ("billions", "bytes_each", "rounded", "free", "expected"),
    [
        (8.0, 1, 1, [10.0], Placement(ONE, is_rounded=False)),
        (1.4, 4, 2, [10.0], Placement(ONE, is_rounded=False)),  # 4 bytes and autocast's copy of 2: 8.4 GiB
        (1.5, 4, 2, [10.0], Placement(ONE, is_rounded=True)),  # 9 GiB do not fit, 3 do
        (4.3, 4, 2, [10.0, 10.0], Placement(ONE, is_rounded=True)),
        (1.5, 4, 4, [10.0], Placement(ONE, is_rounded=False)),  # fp32 without autocast: no copy
        (2.5, 4, 4, [10.0, 10.0], Placement(SEVERAL, is_rounded=False)),
        (5.0, 4, 2, [10.0, 10.0], Placement(SEVERAL, is_rounded=True)),
        (5.0, 2, 4, [10.0, 10.0], Placement(SEVERAL, is_rounded=False)),  # wider than it is loaded: never
        (5.0, 2, 2, [2.0, 16.0], Placement(ONE, is_rounded=False)),
    ],
)
def test_the_first_place_that_fits(
    billions: float, bytes_each: int, rounded: int, free: list[float], expected: Placement
) -> None:
    assert choose_placement(int(billions * GIB), bytes_each, rounded, free) == expected


def test_model_that_fits_nowhere_is_refused_with_numbers() -> None:
    with pytest.raises(
        DoesNotFitError, match=r"needs about 22\.5 GiB .* 20\.0 GiB are free on 2 GPUs.*on the CPU"
    ) as raised:
        choose_placement(10 * GIB, 4, 2, [10.0, 10.0])
    assert raised.value.exit_code == 3
    with pytest.raises(DoesNotFitError, match="free on 1 GPU;"):
        choose_placement(10 * GIB, 2, 2, [10.0])


class Moved(torch.nn.Linear):
    """A layer that records the devices it is moved to."""

    dtype = torch.float32

    def to(self, where: Any) -> Any:  # type: ignore[override]
        self.sent = [*getattr(self, "sent", []), where]
        return self


def test_it_goes_to_the_gpu_with_the_most_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    free = {0: 0.0, 1: 0.55 * GIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (free[number], GIB))
    small: Any = Moved(2, 2)
    assert place_on_gpus(small, torch.bfloat16) == (small, None)
    assert small.sent == ["cuda:1"]
    large: Any = Moved(4096, 2**11)  # 32 MiB, and 16 MiB of autocast's
    _, note = place_on_gpus(large, torch.bfloat16)
    assert large.sent == [torch.bfloat16, "cuda:1"]
    assert note == "its weights are rounded to bfloat16, since they do not fit otherwise"


def test_quantized_weights_are_on_the_gpu_already() -> None:
    quantized: Any = Moved(2, 2)
    quantized.quantization_method = "bitsandbytes"
    assert place_on_gpus(quantized, torch.bfloat16) == (quantized, None)
    assert not hasattr(quantized, "sent")


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the manual"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (torch.distributed.DistBackendError("NCCL error: Last error:\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
    ids=["cuda", "cpu", "python", "driver", "cublas", "cudnn", "nccl", "illegal", "cublas-failed", "other"],
)
def test_errors_that_mean_too_little_memory(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory
