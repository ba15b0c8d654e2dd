"""Stand-ins for what has no fake kernel on a CPU, or keeps other tensors there than on a GPU.

They allocate what the GPU's kernels allocate and save what those save, and compute nothing. Shapes: B rows, H heads of
queries, G of keys and values, T tokens, D numbers a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import moe
from transformers.masking_utils import sdpa_mask

from tunebook.facts.compiling import attention_flops
from tunebook.model import fp8
from tunebook.model.four_bit import PER_OUTER_SCALE, PER_SCALE, FourBitLinear
from tunebook.model.linear_attention import (
    GATED_DELTA_RULE,
    MAMBA_FUSED,
    MAMBA_SCAN,
    StateFunction,
    mamba_in_steps,
    replace_functions,
)
from tunebook.plan.memory.activations import BY_LENGTHS, BY_MASK

BF16, FP32 = torch.bfloat16, torch.float32
Tensor = torch.Tensor


def _is_autocast() -> bool:
    return torch.is_autocast_enabled("cpu")


def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast casts what a product reads."""
    return tuple(each.to(BF16) for each in tensors) if _is_autocast() else tensors


# Attention


@torch.library.custom_op("tunebook::fake_attention", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keys: int) -> tuple[Tensor, Tensor]:
    """(B, H, T, D), (B, G, T, D) twice, (B, 1, T, T) -> the result (B, T, H, D), and a number per query in fp32.

    `keys`: of each query on average, for FLOPs; 0: by the mask.
    """
    raise NotImplementedError


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keys: int) -> tuple[Tensor, Tensor]:
    rows, heads, tokens, _ = query.shape
    return query.new_empty(rows, tokens, heads, value.shape[-1]), query.new_empty(query.shape[:-1], dtype=FP32)


@torch.library.custom_op("tunebook::fake_attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raise NotImplementedError


@_attend_backward.register_fake
def _(grad: Any, query: Any, key: Any, value: Any, output: Any, sums: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    in_fp32 = query.new_empty(query.shape, dtype=FP32)  # in which flash attention sums the query's gradient
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), in_fp32


def _keep_attention(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], *output, inputs[3])


def _attention_gradients(ctx: Any, grad: Any, _: Any) -> Any:
    *saved, _mask = ctx.saved_tensors
    return (*torch.ops.tunebook.fake_attention_backward(grad, *saved)[:3], None, None)


def _attention_flops(query: Any, key: Any, value: Any, mask: Any, keys: int, **_: Any) -> int:
    if not keys and mask is None:
        return attention_flops(query)
    return 4 * int(query.numel()) * (keys or int(key.shape[2]))


attend.register_autograd(_attention_gradients, setup_context=_keep_attention)
flop_registry[torch.ops.tunebook.fake_attention] = _attention_flops  # by which torch chooses what to recompute


def register_attention(*, repeats_heads: bool, keeps_documents: bool, group_size: int) -> None:
    """Register both for the layers that are run next; `facts.attention` says what the settings mean.

    `group_size`: number of ranks that share a row and exchange their tokens for heads before and after.
    """

    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> tuple[Any, None]:
        query, key, value = cast(query, key, value)
        if group_size > 1:  # what the exchange sends and what it receives
            query, key, value = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key, value))
        groups = query.shape[1] // key.shape[1]
        if repeats_heads and groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        if attention_mask is not None:  # numbers, which are added to the scores
            attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype)
        output = torch.ops.tunebook.fake_attention(query, key, value, attention_mask, 0)[0]
        return output.clone() if keeps_documents or group_size > 1 else output, None

    for name, mask in ((BY_LENGTHS, lambda *_, **__: None), (BY_MASK, sdpa_mask)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)


class _StateKernel(torch.autograd.Function):
    """fla-core's kernels (0.6.0, ops/simple_gla/chunk.py): save their inputs, with the gates' running sum in fp32.

    The gated delta rule (ops/gated_delta_rule/chunk.py) also saves query and key with their norms' factors, beta, and
    one row of a matrix (chunk, chunk) per token and head.
    """

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, gates: Any, beta: Any) -> Any:
        saved = [query, key, value, torch.empty_like(gates, dtype=FP32)]
        if beta is not None:
            saved[:2] = [torch.empty_like(each) for each in (query, key)]
            saved += [each.new_empty(each.shape[:-1], dtype=FP32) for each in (query, key)]
            saved += [beta, key.new_empty(*value.shape[:-1], _CHUNK)]
        ctx.save_for_backward(*saved)
        ctx.inputs = query, key, value, gates, beta
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        inputs, ctx.inputs = ctx.inputs, None
        return tuple(None if each is None else torch.empty_like(each) for each in inputs)


_CHUNK = 64  # tokens


def _linear_attention(query: Any, key: Any, value: Any, gates: Any, **_: Any) -> tuple[Any, None]:
    kernel: Any = _StateKernel
    return kernel.apply(*cast(query, key, value), gates, None), None


def _gated_delta_rule(query: Any, key: Any, value: Any, *, g: Any, beta: Any, **_: Any) -> tuple[Any, None]:
    kernel: Any = _StateKernel
    return kernel.apply(*cast(query, key, value), g, beta), None


def replace_state_kernels(model: nn.Module) -> Callable[[], None]:
    """Use fla-core's kernels for the states of linear attention and Mamba-2; calling the result puts others back."""

    def stand_in(each: StateFunction) -> Callable[..., Any] | None:
        if each.kernel in (MAMBA_SCAN, MAMBA_FUSED):
            return mamba_in_steps(_linear_attention, each)
        return _gated_delta_rule if each.kernel == GATED_DELTA_RULE else None

    return replace_functions(model, stand_in)


# Products


class _Grouped(torch.autograd.Function):
    """torch's grouped product of experts: keeps its input only if the experts are trained."""

    @staticmethod
    def forward(ctx: Any, tokens: Any, weight: Any, _: Any) -> Any:
        ctx.save_for_backward(tokens if ctx.needs_input_grad[1] else None, weight)
        ctx.shape = tokens.shape
        return tokens.new_empty(tokens.shape[0], weight.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        _, weight = ctx.saved_tensors
        return grad.new_empty(ctx.shape), torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None


def _grouped_product(tokens: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    grouped: Any = torch._grouped_mm if weight.dtype is BF16 else _Grouped.apply  # torch's has no other format
    product: Tensor = grouped(tokens.to(weight.dtype), weight, offs)
    return product


class _Zero3Linear(torch.autograd.Function):
    """DeepSpeed's linear function of stage 3: keeps the input as it came and the weight itself, no cast copies."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.is_cast = _is_autocast()
        output = x.matmul(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        with torch.autocast("cpu", BF16, enabled=ctx.is_cast):
            to_x = grad.matmul(weight) if of_x else None
            flat = grad.reshape(-1, grad.shape[-1])
            to_weight = flat.t().matmul(x.reshape(-1, x.shape[-1])) if of_weight else None
        return to_x, to_weight, flat.sum(0) if of_bias else None


class _FourBit(torch.autograd.Function):
    """bitsandbytes' product: keeps nothing but the weight, which it turns into 16 bits in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(weight)
        return x.matmul(torch.empty_like(weight, dtype=x.dtype).t())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.matmul(torch.empty_like(ctx.saved_tensors[0], dtype=grad.dtype)), None


def four_bit_forward(self: nn.Linear, x: Tensor) -> Tensor:
    """The forward pass of a linear layer whose weight is quantized to 4 bits."""
    product: Any = _FourBit
    output: Tensor = product.apply(x.to(BF16), self.weight)
    return (output if self.bias is None else output + self.bias.to(BF16)).to(x.dtype)


def quantize(layers: nn.Module) -> None:
    """Give adapted layers a base in 4 bits, as bitsandbytes makes it."""
    for adapted in layers.modules():
        base: Any = getattr(adapted, "base_layer", None)
        if base is not None:
            num_scales = math.ceil(base.weight.numel() / PER_SCALE)
            outer = SimpleNamespace(code=torch.empty(256), absmax=torch.empty(math.ceil(num_scales / PER_OUTER_SCALE)))
            base.weight.data = torch.empty(math.ceil(base.weight.numel() / 2), dtype=torch.uint8)
            base.weight.quant_state = SimpleNamespace(
                code=torch.empty(16), absmax=torch.empty(num_scales, dtype=torch.uint8), state2=outer,
                offset=torch.empty(()),
            )  # fmt: skip
            base.compute_dtype = BF16
            adapted.base_layer = FourBitLinear(base)


class _Fp8(torch.autograd.Function):
    """torchao's product (0.18, float8_linear.py), which casts to 8 bits what it multiplies and keeps its input so."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        flat = x.reshape(-1, x.shape[-1]).to(_FP8)
        ctx.save_for_backward(flat, weight)
        ctx.shape = x.shape
        one = torch.ones((), dtype=FP32)
        product = torch._scaled_mm(flat, weight.to(_FP8).t(), scale_a=one, scale_b=one, out_dtype=BF16)
        return product.reshape(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        flat, weight = ctx.saved_tensors
        grad8, one = grad.reshape(-1, grad.shape[-1]).to(_FP8), torch.ones((), dtype=FP32)
        to_x = torch._scaled_mm(grad8, weight.to(_FP8).t().contiguous().t(), scale_a=one, scale_b=one, out_dtype=BF16)
        turned = grad8.t().contiguous(), flat.t().contiguous().t()
        to_weight = torch._scaled_mm(*turned, scale_a=one, scale_b=one, out_dtype=BF16)
        return to_x.reshape(ctx.shape), to_weight.to(weight.dtype)


_FP8 = torch.float8_e4m3fn


def fp8_forward(self: nn.Linear, x: Tensor) -> Tensor:
    """The forward pass of a linear layer that multiplies in fp8."""
    product: Any = _Fp8
    output: Tensor = product.apply(x, self.weight)
    return output if self.bias is None else output + self.bias.to(BF16)


def _scaled_product(values: Tensor, token_scale: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The product of `model.fp8`, as on a GPU."""
    return torch._scaled_mm(values, weight.t(), scale_a=token_scale, scale_b=scale.t(), out_dtype=BF16)


@contextmanager
def products(*, zero3_linear: bool) -> Iterator[None]:
    """Use the grouped product, and for `zero3_linear` DeepSpeed's function for every linear layer."""
    by_zero3: Any = _Zero3Linear
    linear = (lambda x, weight, bias=None: by_zero3.apply(x, weight, bias)) if zero3_linear else functional.linear
    with (
        mock.patch.object(moe, "_can_use_grouped_mm", lambda *_: False),
        mock.patch.object(moe, "_grouped_mm", _grouped_product),
        mock.patch.object(functional, "linear", linear),
        mock.patch.object(fp8, "scaled_product", _scaled_product),
    ):
        yield


# The output head

_TILE_TOKENS, _TILE_WORDS = 4096, 32768  # trl 1.16, kernels/chunked_logprob.py


class Head(torch.autograd.Function):
    """TRL's fused head in tiles; with one pass its gradients are computed in the forward pass (`train.one_pass_head`).

    Shapes: hidden (N, hidden size), weight (vocabulary, hidden size) -> (N,).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, one_pass: bool) -> Any:  # noqa: D102
        ctx.needs, ctx.one_pass = ctx.needs_input_grad[:2], one_pass
        ctx.dtype = BF16 if _is_autocast() else hidden.dtype
        if one_pass:
            ctx.gradients, ctx.kinds = _head_gradients(ctx, hidden, weight), (hidden.dtype, weight.dtype)
            _run_tile(ctx, hidden, weight, len(weight))
        else:
            ctx.save_for_backward(hidden, weight)
            _run_tile(ctx, hidden, weight, _TILE_WORDS)
        return hidden.new_empty(len(hidden), dtype=FP32)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:  # noqa: D102
        if ctx.one_pass:
            found, kinds, ctx.gradients = ctx.gradients, ctx.kinds, None
        else:
            hidden, weight = ctx.saved_tensors
            found, kinds = _head_gradients(ctx, hidden, weight), (hidden.dtype, weight.dtype)
            _run_tile(ctx, hidden, weight, _TILE_WORDS)
        return (*(None if one is None else one.to(kind) for one, kind in zip(found, kinds, strict=True)), None)


def _head_gradients(ctx: Any, *both: Tensor) -> list[Tensor | None]:
    return [torch.empty_like(each, dtype=FP32) if need else None for each, need in zip(both, ctx.needs, strict=True)]


def _run_tile(ctx: Any, hidden: Tensor, weight: Tensor, words: int) -> None:
    """Allocate the logits of a tile and the part of the weight that it reads."""
    words = min(words, len(weight))
    part = weight.detach() if words == len(weight) and ctx.one_pass else weight[:words].detach().clone()
    _ = part.to(ctx.dtype), hidden.new_empty(min(len(hidden), _TILE_TOKENS), words, dtype=ctx.dtype)


# Autocast


# Functions of layers that CUDA's autocast computes in fp32 and the CPU's does not. Source: PyTorch's list "CUDA Ops
# that can autocast to float32" (torch.amp).
_IN_FP32 = frozenset({
    "__pow__", "__rpow__", "cumprod", "cumsum", "exp", "expm1", "group_norm", "layer_norm", "log", "log10", "log1p",
    "log2", "log_softmax", "norm", "pow", "prod", "reciprocal", "rsqrt", "softmax", "softmin", "softplus", "sum",
})  # fmt: skip


class CudaFunctions(TorchFunctionMode):
    """Casts to fp32 what CUDA's autocast casts, and keeps masks of dropout in bytes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function as it is on a GPU."""
        kwargs, name = kwargs or {}, getattr(function, "__name__", None)
        if name in _IN_FP32 and _is_autocast():
            args = tuple(each.float() if _is_float(each) else each for each in args)
        if name == "dropout":
            rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            is_on = kwargs.get("training", args[2] if len(args) > 2 else True)
            return torch.ops.aten.native_dropout(args[0], rate, True)[0] if is_on and rate else args[0]
        return function(*args, **kwargs)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


# Liger's kernels (liger-kernel 0.8.5)


class _LigerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=FP32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, torch.empty_like(ctx.saved_tensors[1])  # computed in place


class _LigerSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Any, up: Any) -> Any:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.saved_tensors  # overwritten in place


def use_liger(decoder: nn.Module) -> None:
    """Give the norms and gated MLPs of a decoder Liger's kernels."""
    norm: Any = _LigerNorm
    silu: Any = _LigerSilu

    def mlp_forward(mlp: Any, x: Tensor) -> Tensor:
        output: Tensor = mlp.down_proj(silu.apply(mlp.gate_proj(x), mlp.up_proj(x)))
        return output

    for module in decoder.modules():
        layer: Any = module
        if type(module).__name__.endswith("RMSNorm"):
            layer.forward = lambda x, layer=layer: norm.apply(x, layer.weight)
        elif hasattr(module, "gate_proj") and hasattr(module, "act_fn"):
            layer.forward = lambda x, layer=layer: mlp_forward(layer, x)
