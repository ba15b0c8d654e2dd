"""CUDA's autocast, where tensors are on the CPU: it computes more in fp32 than the CPU's own does.

So a LayerNorm of bf16 numbers keeps its input in fp32 on a GPU, twice as many bytes as a CPU keeps. Both compute
products in bf16. Source: PyTorch's list "CUDA Ops that can autocast to float32" (torch.amp), of which here is what
decoder layers use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_IN_FP32 = frozenset({
    "__pow__", "__rpow__", "cumprod", "cumsum", "exp", "expm1", "group_norm", "layer_norm", "log", "log10", "log1p",
    "log2", "log_softmax", "norm", "pow", "prod", "reciprocal", "rsqrt", "softmax", "softmin", "softplus", "sum",
})  # fmt: skip


class CudaAutocast(TorchFunctionMode):
    """Inside it and under the CPU's autocast, what CUDA's would compute in fp32 gets its numbers in fp32."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the function, with inputs cast where it is on the list."""
        kwargs = kwargs or {}
        if getattr(function, "__name__", None) in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args = tuple(map(_in_fp32, args))
            kwargs = {name: _in_fp32(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
