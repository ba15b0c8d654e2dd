"""The transformer blocks of a model, as transformers names their classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def transformer_blocks(model: nn.Module) -> dict[str, Any]:
    """Every block by its name in the model; none where transformers does not say which classes they are."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    return {name: module for name, module in model.named_modules() if type(module).__name__ in classes}
