"""Weights under the names that files have, where a model in memory has others: experts in one tensor, other prefixes.

What was sharded or merged has the names of modules. transformers reads a file of those, but what serves a model knows
the published ones only; so they are written as transformers itself would save them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Tensors = dict[str, "torch.Tensor"]


def as_stored(model: PreTrainedModel, names: Collection[str]) -> Callable[[Tensors], Tensors] | None:
    """What turns tensors named as the model's own into those of a file; None where they are named so already.

    To be called with whole layers: some tensors of a file are made of several of a layer's.
    """
    from transformers.core_model_loading import revert_weight_conversion

    if not set(names) <= set(model.state_dict()):
        return None

    def convert(tensors: Tensors) -> Tensors:
        reverted: Any = revert_weight_conversion(model, tensors)
        return {name: _apart(tensor) for name, tensor in reverted.items()}

    return convert


def layer_of(name: str) -> str:
    """The part of a tensor's name that all of its layer have in common; the whole name outside of layers."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: number + 1])


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """With memory of its own: safetensors refuses to write two views of one."""
    is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone().contiguous() if is_view else tensor.contiguous()
