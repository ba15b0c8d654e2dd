"""Adapters: written as PEFT loads them, from any form of checkpoint, or merged into their base model.

The base is in memory once, in the number format that is written; adapters are small beside it.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from tunebook.checkpoint.export.model import Blueprint, quiet_peft
from tunebook.checkpoint.export.stored_weights import RenamedWeights, Weights
from tunebook.checkpoint.export.write import compare_with
from tunebook.model.adapters import adapter_shapes

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

_NAME = "default"  # that PEFT gives the one adapter of a model
_OF_THE_BASE = (".base_layer.", ".original_module.")
_ADAPTER = ".lora_"


def adapter_weights(weights: Weights) -> RenamedWeights:
    """An adapter's tensors by their names in its file: shards carry the adapter's own name in theirs."""
    names = {_plain(name): name for name in weights.shapes if not _is_of_the_base(name)}
    return RenamedWeights(weights, names)


def _is_of_the_base(name: str) -> bool:
    """Of two adapters on one module, such as those on both parameters of stacked experts, one is the other's base."""
    return any(part in name for part in _OF_THE_BASE) and _ADAPTER not in name


def _plain(name: str) -> str:
    """`...lora_A.default.weight` -> `...lora_A.weight`; `...modules_to_save.default.weight` -> `...weight`."""
    return name.replace(f".modules_to_save.{_NAME}.", ".").replace(f".{_NAME}.", ".")


def require_first_step(blueprint: Blueprint, weights: Weights, place: str) -> PeftConfig:
    """Compare an adapter with its base; returns its settings with the modules that they mean by name.

    Raises: RequestError naming tensors that are empty, missing, misshapen or of another adapter.
    """
    import torch

    assert blueprint.adapter is not None
    on_meta = blueprint.model.to(device=torch.device("meta"))  # type: ignore[call-arg]  # as upstream's own wrapper
    adapted = _attached(copy.deepcopy(on_meta), blueprint.adapter)
    compare_with(adapter_shapes(adapted), weights.shapes).refuse(place)
    settings: PeftConfig = adapted.peft_config[_NAME]
    settings.inference_mode = True
    return settings


def with_trained(base: PreTrainedModel, settings: PeftConfig, weights: Weights) -> Any:
    """The base with an adapter beside it, whose tensors are the checkpoint's."""
    from peft import set_peft_model_state_dict

    adapted = _attached(base, settings)
    found: Any = set_peft_model_state_dict(adapted, dict(weights.read(weights.shapes)))
    assert not found.unexpected_keys, found.unexpected_keys  # compared before
    return adapted.eval()


def _attached(base: PreTrainedModel, settings: PeftConfig) -> Any:
    from peft import get_peft_model

    fresh = copy.deepcopy(settings)
    fresh.inference_mode = False
    with quiet_peft():
        return get_peft_model(base, fresh)
