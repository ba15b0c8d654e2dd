"""The frozen linear layers under adapters, multiplied in fp8.

torchao's fp8 layers are for trained weights: they keep the weight in 16 bits, convert it in every pass, and compute its
gradient. A frozen weight is converted once, for each direction with a scale of its own: by output features for the
forward pass, by input features for the gradient of the input. Both copies together have the size of the bf16 weight.
Inputs and gradients get a scale per token, so documents in a row do not affect each other. Adapters stay as they are.

Checkpoints, merging and export use the base model's own files.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tunebook.errors import RequestError
from tunebook.model.blocks import ALIGNMENT, transformer_blocks

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_SMALLEST_SCALE = 1e-12  # of a row of zeros


def convert_base_to_fp8(adapted: nn.Module) -> list[str]:
    """Make the base of every adapted linear layer multiply in fp8; their names.

    Raises: RequestError if no layer has sizes that fp8 products support.
    """
    converted = []
    for block, module in transformer_blocks(adapted).items():
        for name, layer in module.named_modules():
            base = getattr(layer, "base_layer", None)
            if type(base) is nn.Linear and not base.in_features % ALIGNMENT and not base.out_features % ALIGNMENT:
                layer.base_layer = Fp8Linear(base)
                converted.append(f"{block}.{name}")
    if not converted:
        raise RequestError(
            "precision.compute=fp8: no adapted linear layer has sizes that are multiples of "
            f"{ALIGNMENT}; try precision=bf16",
            problem_id="fp8-nothing-to-convert",
        )
    return converted


class Fp8Linear(nn.Module):
    """A frozen linear layer in fp8: (..., in_features) -> (..., out_features) in bf16."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach()
        self.bias = layer.bias
        for name, matrix in (("weight", weight), ("turned", weight.t())):
            values, scale = in_fp8(matrix)
            self.register_buffer(name, values, persistent=False)
            self.register_buffer(f"{name}_scale", scale, persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Multiply in fp8, and add the bias in bf16."""
        function: Any = _FrozenProduct  # untyped upstream
        product: torch.Tensor = function.apply(hidden, self.weight, self.weight_scale, self.turned, self.turned_scale)
        return product if self.bias is None else product + self.bias.to(product.dtype)


def in_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, K) -> (N, K) in fp8, and (N, 1) in fp32: the scales to multiply the rows with."""
    rows = rows.float()
    scale = (rows.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp(min=_SMALLEST_SCALE)
    return (rows / scale).to(FP8).contiguous(), scale


class _FrozenProduct(torch.autograd.Function):
    """hidden @ weight.T and, backward, gradient @ weight. Shapes: weight (out, in), turned (in, out)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, turned: torch.Tensor,
        turned_scale: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(turned, turned_scale)
        ctx.dtype = hidden.dtype
        return _multiply(hidden, weight, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _multiply(gradient, *ctx.saved_tensors).to(ctx.dtype), None, None, None, None


def _multiply(tokens: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(..., K) times (N, K) in fp8 -> (..., N) in bf16."""
    values, token_scale = in_fp8(tokens.reshape(-1, tokens.shape[-1]))
    product = scaled_product(values, token_scale, weight, scale)
    return product.reshape(*tokens.shape[:-1], -1)


def scaled_product(
    values: torch.Tensor, token_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """(T, K) times (N, K), each row with its scale -> (T, N) in bf16; on a CPU the same numbers without fp8."""
    if not values.is_cuda:
        return ((values.float() * token_scale) @ (weight.float() * scale).t()).to(torch.bfloat16)
    return torch._scaled_mm(
        values, weight.t(), scale_a=token_scale, scale_b=scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )
