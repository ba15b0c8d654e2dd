"""Linear layers of the transformer blocks that multiply in fp8: torchao's for trained weights, ours for frozen ones.

torchao's layers keep the weight in 16 or 32 bits, convert it in every pass, and compute its gradient. A frozen weight
under adapters is converted once, for each direction with scales of its own: by output features for the forward pass, by
input features for the gradient of the input. Both copies together have the size of the bf16 weight, which is freed.
Inputs and gradients get a scale per token, so documents in a row do not affect each other. Adapters stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tunebook.config.choices import Fp8Scaling
from tunebook.errors import RequestError
from tunebook.model.blocks import text_blocks

ALIGNMENT = 16  # sizes of fp8 products are multiples of this: of features, and of tokens in the weights' gradients
FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_SMALLEST_SCALE = 1e-12  # of a row of zeros


def pays(scaling: Fp8Scaling, in_features: int, out_features: int) -> bool:
    """Whether turning the tensors into fp8 costs less than the products save.

    Source: torchao 0.18's `_auto_filter_for_tensorwise` and `_auto_filter_for_rowwise`, measured on H100.
    """
    if scaling is Fp8Scaling.tensorwise:
        return in_features > 4096 or out_features > 1024
    return out_features > 2048 and in_features > 1024 and (out_features > 4096 or in_features > 2048)


def layers_for_fp8(model: nn.Module, scaling: Fp8Scaling) -> list[str]:
    """The names of the linear layers that multiply in fp8 once converted."""
    return [
        f"{block}.{name}"
        for block, module in text_blocks(model).items()
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
        and not layer.in_features % ALIGNMENT
        and not layer.out_features % ALIGNMENT
        and pays(scaling, layer.in_features, layer.out_features)
    ]


def convert_to_fp8(model: nn.Module, scaling: Fp8Scaling, *, emulate: bool = False) -> list[str]:
    """Make the layers that gain from it multiply in fp8, before the model is wrapped; their names.

    `emulate` computes on a CPU what a GPU would. Raises: RequestError where no layer would gain.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = layers_for_fp8(model, scaling)
    if not names:
        raise RequestError(
            f"precision.compute=fp8: no linear layer of {type(model).__name__} is large enough to be faster in fp8 "
            f"with precision.fp8_scaling={scaling.name}; try precision=bf16",
            problem_id="fp8-nothing-to-convert",
        )
    chosen = set(names)
    kind: Any = Float8LinearConfig
    settings = replace(kind.from_recipe_name(scaling.value), emulate=emulate)
    convert_to_float8_training(model, config=settings, module_filter_fn=lambda _, name: name in chosen)
    return names


def convert_frozen_to_fp8(model: nn.Module) -> list[str]:
    """Make the frozen linear layers of the blocks multiply in fp8, in place and one at a time; their names.

    Not those whose sizes fp8 products do not support, such as the gate of a shared expert, nor the last layer of a
    Mamba block, whose weight transformers hands to a kernel.
    Raises: RequestError if no layer is left.
    """
    names = [
        f"{block}.{name}"
        for block, module in text_blocks(model).items()
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear
        and not layer.weight.requires_grad
        and not layer.in_features % ALIGNMENT
        and not layer.out_features % ALIGNMENT
        and not _is_read_by_a_kernel(module, name)
    ]
    if not names:
        raise RequestError(
            f"precision.compute=fp8: {type(model).__name__} has no frozen linear layer with sizes that are "
            f"multiples of {ALIGNMENT}; try precision=bf16",
            problem_id="fp8-nothing-to-convert",
        )
    for name in names:  # the names alone, so that each bf16 weight is freed before the next one is converted
        model.set_submodule(name, FrozenFp8Linear(model.get_submodule(name)))
    return names


def _is_read_by_a_kernel(block: nn.Module, name: str) -> bool:
    """Whether a layer is the output projection of a state-space layer (Mamba)."""
    parent, _, last = name.removesuffix(".base_layer").rpartition(".")
    return last == "out_proj" and hasattr(block.get_submodule(parent), "A_log")


class FrozenFp8Linear(nn.Module):
    """A frozen linear layer in fp8: (..., in_features) -> (..., out_features) in bf16.

    The fp8 numbers are stored as bytes, which every library sends and moves without a conversion. There is no `weight`,
    so that code that reads one fails instead of computing with bytes.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        weight = layer.weight.detach()
        self.forward_weight, self.forward_scale = _frozen(*in_fp8(weight))  # (out, in), (out, 1)
        self.backward_weight, self.backward_scale = _frozen(*in_fp8(weight.t()))  # (in, out), (in, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Multiply in fp8, and add the bias in bf16."""
        function: Any = _FrozenProduct  # untyped upstream
        product: torch.Tensor = function.apply(
            hidden, self.forward_weight, self.forward_scale, self.backward_weight, self.backward_scale
        )
        return product if self.bias is None else product + self.bias.to(product.dtype)


def _frozen(values: torch.Tensor, scale: torch.Tensor) -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(values.view(torch.uint8), requires_grad=False), nn.Parameter(scale, requires_grad=False)


def in_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, K) -> (N, K) in fp8, and (N, 1) in fp32: the scales to multiply the rows with."""
    rows = rows.float()
    scale = (rows.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp(min=_SMALLEST_SCALE)
    return (rows / scale).to(FP8).contiguous(), scale


class _FrozenProduct(torch.autograd.Function):
    """hidden @ weight.T and, in the backward pass, gradient @ weight."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        forward_weight: torch.Tensor,
        forward_scale: torch.Tensor,
        backward_weight: torch.Tensor,
        backward_scale: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(backward_weight, backward_scale)
        ctx.dtype = hidden.dtype
        return _multiply(hidden, forward_weight, forward_scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _multiply(gradient, *ctx.saved_tensors).to(ctx.dtype), None, None, None, None


def _multiply(tokens: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(..., K) times (N, K) in fp8 -> (..., N) in bf16."""
    values, token_scale = in_fp8(tokens.reshape(-1, tokens.shape[-1]))
    product = scaled_product(values, token_scale, weight.view(FP8), scale)
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


def count_fp8_layers(model: nn.Module) -> int:
    """How many layers of a model, wrapped or not, multiply in fp8. Asks the layers, not a configuration."""
    return len(_converted(model)) + sum(isinstance(layer, FrozenFp8Linear) for layer in model.modules())


@contextmanager
def plain_products(model: nn.Module) -> Iterator[None]:
    """Inside, trained layers in fp8 multiply like others.

    One scale for a whole row of documents changes with each of them, by less than fp8 rounds to and by far more than
    bf16 does, so such products cannot show whether documents affect each other. Frozen layers have a scale per token.
    """
    converted = _converted(model)
    classes = [type(layer) for layer in converted]
    try:
        for layer in converted:
            layer.__class__ = nn.Linear
        yield
    finally:
        for layer, kind in zip(converted, classes, strict=True):
            layer.__class__ = kind


def _converted(model: nn.Module) -> list[nn.Module]:
    import sys

    module = sys.modules.get("torchao.float8.float8_linear")  # never imported: nothing was converted
    return [layer for layer in model.modules() if isinstance(layer, module.Float8Linear)] if module else []
