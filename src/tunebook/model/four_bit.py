"""Frozen linear layers in 4 bits (NF4) for compiled blocks: the same numbers as bitsandbytes' layers, faster.

bitsandbytes (0.50) dequantizes a weight by kernels of its own. Here the same arithmetic is in torch's operations: the
compiler makes one kernel of it, and knows that a 16-bit weight is cheaper to compute again than to keep. A step of LoRA
had 99% of the speed that it has over bf16 so, and 79% with bitsandbytes' layers (h200_adapter_variants.jsonl).
Source: QLoRA (arXiv 2305.14314), section 3; bitsandbytes' `functional.QuantState`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional

PER_SCALE = 64  # weights that share a scale
PER_OUTER_SCALE = 256  # scales that share a scale of their own


class FourBitLinear(nn.Module):
    """A frozen linear layer: (..., in_features) -> (..., out_features).

    Frozen parameters: `weight`, bytes of two weights each, the first in the high bits, which are numbers in `values`;
    `scales` in 8 bits, which are numbers in `scale_values`, times `outer_scales`, plus `mean_scale`.
    """

    weight: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor
    scale_values: torch.Tensor
    outer_scales: torch.Tensor
    mean_scale: torch.Tensor

    def __init__(self, layer: Any) -> None:
        super().__init__()
        state = layer.weight.quant_state
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        self.dtype = layer.compute_dtype
        frozen = {
            "weight": layer.weight.data.reshape(-1).view(torch.uint8),
            "values": state.code,
            "scales": state.absmax,
            "scale_values": state.state2.code,
            "outer_scales": state.state2.absmax,
            "mean_scale": state.offset,
        }
        for name, tensor in frozen.items():
            setattr(self, name, nn.Parameter(tensor.as_subclass(torch.Tensor), requires_grad=False))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Multiply with the dequantized weight."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return functional.linear(hidden.to(self.dtype), self.dequantized(), bias).to(hidden.dtype)

    def dequantized(self) -> torch.Tensor:
        """The weight (out_features, in_features) in the format of the computation."""
        outer: torch.Tensor = self.outer_scales.repeat_interleave(PER_OUTER_SCALE)[: len(self.scales)]
        scales = self.scale_values[self.scales.int()] * outer + self.mean_scale
        pairs = torch.stack([self.weight >> 4, self.weight & 15], dim=-1)
        weights = self.values[pairs.int()].reshape(-1, PER_SCALE) * scales[:, None]
        return weights.to(self.dtype).reshape(self.out_features, self.in_features)


def replace_four_bit(blocks: Iterable[nn.Module]) -> None:
    """Replace the layers that bitsandbytes has quantized by NF4 with 8-bit scales."""
    places: list[tuple[nn.Module, str, Any]] = [
        (parent, name, layer)
        for block in blocks
        for parent in block.modules()
        for name, layer in parent.named_children()
        if type(layer).__name__ == "Linear4bit" and not isinstance(layer, LoraLayer)  # PEFT's has the same name
    ]
    places = [place for place in places if _is_nested_nf4(place[2].weight.quant_state)]
    for parent, name, layer in places:
        setattr(parent, name, FourBitLinear(layer))


def _is_nested_nf4(state: Any) -> bool:
    is_nested = state.nested and state.state2.blocksize == PER_OUTER_SCALE
    return bool(state.quant_type == "nf4" and state.blocksize == PER_SCALE and is_nested)
