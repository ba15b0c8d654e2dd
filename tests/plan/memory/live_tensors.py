"""Which tensors are alive at once while a small Llama's layers are computed, without any memory.

Autograd's own saved tensors say what is kept between the passes, not what is at work in one of them. Here a decoder of
three layers goes through both passes under PyTorch's FakeTensorMode, every operation is looked at, and the bytes of all
storages that live then are added up: those that have a shape of a weight, its gradients and copies, left out. What
grows with the hidden and the inner size comes from the differences of models of two sizes.

On a GPU dropout keeps a byte for each number, and attention what `meta_device.kernels` says: both are stood in for.
Python's own frames hold a tensor or two that compiled code would have let go.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.config.choices import Compute, MasterWeights, PeftMethod
from tunebook.config.schema import RunConfig
from tunebook.model.tiled_mlp import tile_mlps
from tunebook.plan.architecture import kernels, saved
from tunebook.plan.architecture.compiled import compile_layers
from tunebook.plan.architecture.kernels import UNMASKED, VARLEN, CudaAutocast
from tunebook.plan.architecture.layers import decoder_layers, text_decoder

NUM_LAYERS, NUM_HEADS, TOKENS = 3, 16, 1280  # tokens like no size of a weight
MIDDLE, LAST = 1, NUM_LAYERS - 1
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SMALL, _WIDE, _LARGE = (1024, 4096), (1024, 8192), (2048, 8192)  # hidden and inner size


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the layers are computed."""

    weights: torch.dtype = torch.float32
    is_mixed: bool = True  # autocast in bf16
    is_adapter: bool = False
    adapters: torch.dtype = torch.float32
    dropout: float = 0.0
    targets: tuple[str, ...] = ()  # the products that an adapter is put on; none named: on all seven
    is_recomputed: bool = False
    tile_tokens: int | None = None  # of MLPs


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Bytes of each token for each of the hidden and of the inner numbers."""

    hidden: float
    inner: float


def growth_of(way: Way) -> dict[str, Growth]:
    """Of the most that is alive in "forward 0" to "backward 2", and of what is "kept" between the passes."""
    small, wide, large = (_live_bytes(way, *sizes) for sizes in (SMALL, _WIDE, _LARGE))
    found = {}
    for part in small:
        inner = (wide[part] - small[part]) / (_WIDE[1] - SMALL[1]) / TOKENS
        hidden = (large[part] - wide[part]) / (_LARGE[0] - _WIDE[0]) / TOKENS
        found[part] = Growth(hidden=round(hidden, 2), inner=round(inner, 2))
    return found


def kept_growth_of(way: Way) -> Growth:
    """What autograd saves of a middle layer, for each of the hidden and of the inner numbers of a token."""
    small, wide, large = (saved_by_a_layer(way, sizes=sizes)[0] for sizes in (SMALL, _WIDE, _LARGE))
    inner = (wide - small) / (_WIDE[1] - SMALL[1])
    return Growth(hidden=round((large - wide) / (_LARGE[0] - _WIDE[0]), 2), inner=round(inner, 2))


def bytes_of_pairs(way: Way) -> float:
    """For each head and pair of tokens, at most in the last layer's backward pass, of attention without a kernel."""
    part = f"backward {LAST}"
    short, long = (_live_bytes(way, *SMALL, tokens=tokens, attention="eager")[part] for tokens in (TOKENS, 2 * TOKENS))
    return (long - 2 * short) / 2 / TOKENS**2 / NUM_HEADS


def saved_by_a_layer(
    way: Way,
    *,
    kind: str = "llama",
    compiled: str | None = None,
    is_eager: bool = False,
    sizes: tuple[int, int] = SMALL,
    head_size: int | None = None,
) -> tuple[float, float]:
    """Bytes of each token that autograd saves in a middle layer, and those of them that offloading does not move.

    If the way has tiles, the second are those that are saved outside of MLPs.
    `compiled`: how layers are, by its name in `meta_device.saved`. `is_eager`: attention without a kernel.
    `head_size`: of a head, if heads are not the hidden size together.
    """
    kernel = compiled or ("eager" if is_eager else "flash")
    mode = (
        "autocast" if way.is_mixed else "fp32",
        "",
        saved.COMPILED if compiled else kernel,
    )  # of which the weights' format is no part
    attention = VARLEN if compiled else saved.ATTENTION[kernel]
    with without_memory():
        model = _build(way, *sizes, kind=kind, attention=attention, head_size=head_size)
        if compiled:
            layers = decoder_layers(text_decoder(saved._causal(model)), NUM_LAYERS)
            compile_layers(layers, recomputes=compiled == saved.SELECTIVE)
        kept, left, tiled = saved._saved_by_layer(model, NUM_LAYERS, TOKENS, mode, [])
    return kept[MIDDLE] / TOKENS, (tiled if way.tile_tokens is not None else left)[MIDDLE] / TOKENS


def inputs_with_adapter(model: Any, targets: tuple[str, ...], *, dropout: float = 0.0) -> Any:
    """With LoRA of rank 1 on these products. Modules are not moved, which fails without memory."""
    lora = LoraConfig(r=1, target_modules=list(targets) or "all-linear", lora_dropout=dropout, task_type="CAUSAL_LM")
    with mock.patch.object(nn.Module, "to", lambda module, *_, **__: module):
        wrapped = get_peft_model(model, lora)
    wrapped.enable_input_require_grads()
    return wrapped


class Living(TorchDispatchMode):
    """The storages that operations made and somebody still holds; their highest sum in each part of the passes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.part, self.most = "before", {}
        self._of_weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
        shapes = {tuple(weight.shape) for weight in model.parameters()}
        self._shapes = shapes | {tuple(reversed(shape)) for shape in shapes}
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_most = 0  # bytes of all of these, some of which may be gone

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        if self._at_most > self.most.setdefault(self.part, 0):
            self.most[self.part] = max(self.most[self.part], self.num_bytes())
        return made

    def num_bytes(self) -> int:
        """Of all that live now."""
        self._found = {place: found for place, found in self._found.items() if not found[0].expired()}
        self._at_most = sum(size for _, size in self._found.values())
        return self._at_most

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._of_weights or tuple(tensor.shape) in self._shapes:
            return
        reference = StorageWeakRef(storage)
        if reference.cdata not in self._found or self._found[reference.cdata][0].expired():
            self._found[reference.cdata] = (reference, storage.nbytes())
            self._at_most += storage.nbytes()


def most_alive(way: Way, tokens: int) -> int:
    """The most bytes that live in the last layer's backward pass, except its input and all layers'."""
    element = 2 if way.weights is torch.bfloat16 else 4
    return _live_bytes(way, *SMALL, tokens=tokens)[f"backward {LAST}"] - tokens * SMALL[0] * element * (NUM_LAYERS + 2)


def _live_bytes(
    way: Way, hidden: int, inner: int, *, tokens: int = TOKENS, attention: str = UNMASKED
) -> dict[str, int]:
    with without_memory():
        model = _build(way, hidden, inner, attention=attention)
        if way.tile_tokens is not None:
            tile_mlps(saved._causal(model), way.tile_tokens)
        return follow(model, way, Living(model), tokens)


def follow(model: nn.Module, way: Way, living: Living, tokens: int = TOKENS) -> dict[str, int]:
    """The most bytes that live in "forward 0" to "backward 2", and those that are "kept" between the passes."""
    decoder = text_decoder(saved._causal(model))
    for place, layer in enumerate(decoder_layers(decoder, NUM_LAYERS)):
        if way.is_recomputed:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        _name_parts(layer, living, place)
    with living, torch.autocast("cpu", dtype=torch.bfloat16, enabled=way.is_mixed), CudaAutocast():
        output = decoder(**saved._row(tokens, has_lengths=False), use_cache=False).last_hidden_state
        kept = living.num_bytes()
        living.part = "head"
        output.backward(torch.empty_like(output))
    parts = [f"{direction} {place}" for direction in ("forward", "backward") for place in range(NUM_LAYERS)]
    return {part: living.most[part] for part in parts} | {"kept": kept}


def set_formats(config: RunConfig, way: Way) -> None:
    """Give a configuration the number formats of a way, and its method."""
    is_bf16 = way.is_mixed or way.weights is torch.bfloat16
    config.precision.compute = Compute.bf16 if is_bf16 else Compute.fp32
    config.precision.master_weights = MasterWeights.bf16 if way.weights is torch.bfloat16 else MasterWeights.fp32
    config.peft.method = PeftMethod.lora if way.is_adapter else PeftMethod.full


def _name_parts(layer: nn.Module, living: Living, place: int) -> None:
    layer.register_forward_pre_hook(lambda *_: setattr(living, "part", f"forward {place}"))
    layer.register_forward_hook(lambda *_: setattr(living, "part", f"after {place}"))
    layer.register_full_backward_pre_hook(lambda *_: setattr(living, "part", f"backward {place}"))


def _build(
    way: Way, hidden: int, inner: int, *, kind: str = "llama", attention: str = UNMASKED, head_size: int | None = None
) -> nn.Module:
    heads = {} if head_size is None else {"head_dim": head_size}
    config = AutoConfig.for_model(
        kind, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=NUM_LAYERS, num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS, vocab_size=1000, pad_token_id=1, eos_token_id=2, max_position_embeddings=8192,
        **heads,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=way.weights, attn_implementation=attention)
    if way.is_adapter:
        model = inputs_with_adapter(model, way.targets, dropout=way.dropout)
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.to(way.adapters)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.forward = _Dropout.apply
    return model.train()


class _Dropout(torch.autograd.Function):
    """As on a GPU: keeps which numbers it took, a byte each."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty_like(numbers, dtype=torch.bool))
        return torch.empty_like(numbers)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors
        return torch.empty_like(gradient)


def _attention_backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    query, key, value, *_rest = ctx.saved_tensors
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """The stand-in for attention has no backward pass but for the time of this."""
    backward = mock.patch.object(kernels._Kernel, "backward", staticmethod(_attention_backward))
    with saved.quiet(), backward, FakeTensorMode(allow_non_fake_inputs=True):
        yield
