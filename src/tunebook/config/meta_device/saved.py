"""What autograd keeps of one pass through each decoder layer, on tensors that have a shape and no memory.

A prefix of the model is run under PyTorch's FakeTensorMode at three lengths, in every number format and with each kind
of attention, and the storages that autograd saves are added up by the layer that saves them. The three give what is
kept whatever the length, what grows with the tokens, and what grows with their square, such as a mask.

Rougher than the formulas for known layers: stand-ins keep what the attention kernels of a GPU keep, and everything else
is seen as a CPU computes it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

LENGTHS = (62, 124, 186)  # tokens; like no size of a real model, by which copies of weights are told apart
LORA_RANK = 1
# Number format of the weights, and whether autocast computes in bf16.
FORMATS = {"fp32": (torch.float32, False), "autocast": (torch.float32, True), "bf16": (torch.bfloat16, True)}
# Our word for an attention, and what transformers is told: `_Kernel` stands for all kernels but the eager one.
ATTENTION = {"sdpa": "tunebook_masked", "flash": "tunebook_unmasked", "eager": "eager"}
_MOST_LAYERS = 12  # of a prefix


def measure_saved(config: Any, layers: nn.ModuleList, options: dict[str, Any]) -> dict[str, list[int]]:
    """By "format/method/attention" six numbers, as `MeasuredLayers` has them. A mode that cannot be run is left out."""
    kinds = _kinds(config, layers)
    modes = itertools.product(FORMATS, ("full", "adapter"), ATTENTION)
    measured = {"/".join(mode): _measure(config, kinds, mode, options) for mode in modes}
    return {mode: numbers for mode, numbers in measured.items() if numbers is not None}


def decoder_layers(decoder: Any, expected: int) -> nn.ModuleList:
    """The list of decoder layers: the first as long as the config says, else the one with most parameters."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    exact = [each for each in lists if len(each) == expected]
    return exact[0] if exact else max(lists, key=lambda each: sum(p.numel() for p in each.parameters()))


def _kinds(config: Any, layers: nn.ModuleList) -> list[tuple[Any, ...]]:
    """What tells the layers apart: their type where the config names one, and the shapes of their parameters."""
    named = getattr(config.get_text_config(decoder=True), "layer_types", None) or [None] * len(layers)
    shapes = (tuple(tuple(p.shape) for p in layer.parameters()) for layer in layers)
    return list(zip(named, shapes, strict=False))


def _prefix(kinds: list[tuple[Any, ...]]) -> int:
    """As many layers as hold each kind twice, so that one of them is not the first; not more than a few."""
    needed = 2
    for kind in set(kinds):
        places = [place for place, other in enumerate(kinds) if other == kind]
        needed = max(needed, places[min(1, len(places) - 1)] + 1)
    return min(needed, len(kinds), _MOST_LAYERS)


def _measure(
    config: Any, kinds: list[tuple[Any, ...]], mode: tuple[str, str, str], options: dict[str, Any]
) -> list[int] | None:
    prefix = _prefix(kinds)
    try:
        with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
            model = _build(config, prefix, mode, options)
            found = [_saved_by_layer(model, prefix, length, mode) for length in LENGTHS]
    except Exception:  # an attention that it does not have, an operation without a fake kernel
        return None
    by_kind = {kind: [bytes_[place] for bytes_ in found] for place, kind in enumerate(kinds[:prefix])}
    mean = [sum(bytes_) / prefix for bytes_ in found]
    curves = [_curve(by_kind.get(kind, mean)) for kind in kinds]
    largest = max(curves, key=lambda curve: curve[0] + curve[1] * 4096 + curve[2] * 4096**2)
    return [round(number) for number in (*map(sum, zip(*curves, strict=True)), *largest)]


def _curve(found: list[float]) -> tuple[float, float, float]:
    """The parabola through the bytes at three lengths that are 1, 2 and 3 x the first."""
    one, two, three = found
    step = LENGTHS[0]
    squared = (three - 2 * two + one) / (2 * step**2)
    per_token = (two - one) / step - 3 * step * squared
    return one - per_token * step - squared * step**2, per_token, squared


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, and with the experts' product that has a fake kernel in every number format."""
    from transformers.integrations import moe

    _register_kernels()
    before = getattr(moe, "_can_use_grouped_mm", None)
    if before is not None:
        moe._can_use_grouped_mm = lambda *_: False  # its fallback saves the same tensors
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if before is not None:
            moe._can_use_grouped_mm = before


def _build(config: Any, prefix: int, mode: tuple[str, str, str], options: dict[str, Any]) -> Any:
    number_format, method, attention = mode
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config(decoder=True)
    text.num_hidden_layers = prefix
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[:prefix]
    loader: Any = AutoModelForCausalLM
    kernel = ATTENTION[attention]
    model = loader.from_config(shorter, dtype=FORMATS[number_format][0], attn_implementation=kernel, **options)
    if method == "adapter":
        model = adapted(model, rank=LORA_RANK)
    return model.train()


def adapted(model: Any, *, rank: int) -> Any:
    """With LoRA. Modules are not moved, which would fail: a tensor without memory cannot be swapped."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=rank, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    module: Any = nn.Module
    moving = module.to
    module.to = lambda self, *_, **__: self
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped: Any = get_peft_model(model, lora)
            wrapped.enable_input_require_grads()
    finally:
        module.to = moving
    return wrapped


def _saved_by_layer(model: Any, prefix: int, length: int, mode: tuple[str, str, str]) -> list[float]:
    """Bytes by layer. A storage belongs to the layer that saves it first; those of weights are left out, and so are
    copies of weights, which are known by their shape."""
    decoder = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model
    of_weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    sides = {tuple(parameter.shape) for parameter in model.parameters()}
    sides |= {tuple(reversed(shape)) for shape in sides}
    now: list[int | None] = [None]
    saved: dict[int, tuple[int | None, int]] = {}
    kept_alive = []  # or another tensor's storage would be given the same place

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        kept_alive.append(storage)
        if storage._cdata not in of_weights and tuple(tensor.shape) not in sides:
            saved.setdefault(storage._cdata, (now[0], storage.nbytes()))
        return tensor

    for place, layer in enumerate(decoder_layers(decoder, prefix)):
        layer.register_forward_pre_hook(lambda *_, place=place: now.__setitem__(0, place))
        layer.register_forward_hook(lambda *_: now.__setitem__(0, None))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _autocast(mode):
        decoder(**_row(length), use_cache=False)
    return [float(sum(size for where, size in saved.values() if where == place)) for place in range(prefix)]


def _autocast(mode: tuple[str, str, str]) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=FORMATS[mode[0]][1])


def _row(length: int) -> dict[str, Any]:
    """One row of two documents."""
    parts = (length // 2, length - length // 2)
    positions = torch.cat([torch.arange(part) for part in parts])[None]
    return {"input_ids": torch.zeros(1, length, dtype=torch.long), "position_ids": positions}


class _Kernel(torch.autograd.Function):
    """Keeps what flash and memory-efficient attention keep: query, key, value, output, a number per query, the mask."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        output = query.new_empty(*query.shape[:-1], value.shape[-1]).transpose(1, 2).contiguous()
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums, mask)
        return output


def _attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> tuple[Any, None]:
    """As AttentionInterface wants it: from (batch, heads, tokens, size) to (batch, tokens, heads, size)."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    if attention_mask is not None:  # with a mask, keys and values are repeated, and the mask is added to the scores
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) if groups > 1 else tensor for tensor in (key, value))
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype)
    kernel: Any = _Kernel
    return kernel.apply(query, key, value, attention_mask), None


def _register_kernels() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for name, mask in (("tunebook_masked", sdpa_mask), ("tunebook_unmasked", lambda *_, **__: None)):
        AttentionInterface.register(name, _attend)
        AttentionMaskInterface.register(name, mask)
