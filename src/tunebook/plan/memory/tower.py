"""What the fake step needs to run a tower for images: its attention, and the numbers that follow from images' sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from tunebook.plan.memory.stand_ins import cast

Pixels = dict[str, torch.Tensor]  # a model's inputs for images, by name

# A name with "flash" gets all windows and images at once, by their lengths.
_OF_TOWER = "tunebook_fake_flash"


def attend_in_tower(model: nn.Module, decoder: nn.Module) -> None:
    """Have the parts of a model outside of its text decoder attend as by sdpa, their default."""
    AttentionInterface.register(_OF_TOWER, _tower_attention)
    AttentionMaskInterface.register(_OF_TOWER, lambda *_, **__: None)
    for module in {*model.modules()} - {*decoder.modules()}:
        config: Any = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and config is not decoder.config and not config.sub_configs:
            config._attn_implementation_internal = _OF_TOWER


def _tower_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, cu_seq_lens_q: Any = None, **_: Any
) -> tuple[Any, None]:
    query, key, value = cast(query, key, value)
    if cu_seq_lens_q is None:
        return torch.ops.tunebook.fake_attention(query, key, value, None, query.shape[2])[0], None
    lengths = (cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]).tolist()
    keys = sum(length * length for length in lengths) // query.shape[2]
    # sdpa is called for each length, and the results are put together.
    return torch.ops.tunebook.fake_attention(query, key, value, None, keys)[0].clone(), None


def without_memory(pixels: Pixels) -> Pixels:
    """The inputs within a fake step. Whole numbers, such as the patches of each image, keep their values."""
    return {
        name: torch.empty(each.shape, dtype=each.dtype) if each.is_floating_point() else each
        for name, each in pixels.items()
    }


class KnownNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes what a tower finds out from the sizes of images, which decides shapes: whole numbers have memory.

    No pixel has the value that it is compared with, such as the 0 of an image that only fills a batch. `is_in_tower`:
    new whole numbers have memory, too; those of a text decoder would be as large as its masks.
    """

    def __init__(self, *, is_in_tower: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_in_tower = is_in_tower

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, or dynamo refuses to run compiled layers."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation with memory if everything that it reads has some."""
        kwargs, name = kwargs or {}, function.__name__.partition(".")[0]
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        fake = [each for each in tensors if isinstance(each, FakeTensor)]
        is_new = self.is_in_tower and not tensors and not _makes_floats(name, kwargs.get("dtype"))
        if is_new or (tensors and not fake):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        if name in ("eq", "ne") and len(tensors) == 1 and fake[0].is_floating_point():
            with unset_fake_temporarily():
                return torch.full(fake[0].shape, name == "ne")
        if name == "index":  # by a mask: by the places where it is true
            with unset_fake_temporarily():
                args = (args[0], [place for each in args[1] for place in _places(each)])
        return function(*args, **kwargs)


def _makes_floats(name: str, dtype: torch.dtype | None) -> bool:
    return name in ("empty", "zeros", "ones") if dtype is None else dtype.is_floating_point


def _places(index: Any) -> list[Any]:
    is_mask = isinstance(index, torch.Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor)
    return list(index.nonzero().unbind(1)) if is_mask else [index]
