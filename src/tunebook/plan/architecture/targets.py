"""The layers that PEFT puts adapters on, by the names that `peft.target_modules` uses for them.

For PEFT, experts that transformers 5 keeps stacked, and their router, are parameters rather than linear layers. PEFT
finds them by the former names of each expert's linear layers. If two of those layers are now one parameter, both names
match it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from tunebook.config.unreached import expression
from tunebook.model.parameters import last_name

# Names of the linear layers of experts and of a router before they were stacked, grouped by their current parameter.
_STACKED = (("w1", "w3"), ("w2",), ("gate_proj", "up_proj"), ("down_proj",), ("gate",))


def is_linear(module: nn.Module) -> bool:
    """Whether PEFT's "all-linear" includes the module; GPT-2's Conv1D, a transposed linear layer, counts."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def adapters_of(model: Any, unreached: Collection[str]) -> dict[str, Any]:
    """What `LayerFacts` says about adapters: those of rank 1 on all layers that text reaches. Changes the model."""
    stacked, refused = _stacked_names(model), not_adapted(model)
    names = names_to_adapt(model)
    lora = LoraConfig(
        r=1,
        target_modules=names or "all-linear",
        exclude_modules=expression(unreached) if unreached else None,
        task_type="CAUSAL_LM",
    )
    found: dict[str, dict[str, list[int]]] = {"adapters": {}, "expert_adapters": {}}
    for name, module in adapted(model, lora).named_modules():
        if not getattr(module, "lora_A", None):
            continue
        sizes = [part["default"].weight.numel() for part in (module.lora_A, module.lora_B)]
        parameter = getattr(module, "parameter_name", None)
        called = (last_name(name),) if parameter is None else _former_names(name, parameter, stacked)
        kind = found["adapters" if parameter is None else "expert_adapters"]
        for each in called:
            before = kind.get(each, [0, 0])
            kind[each] = [old + size // len(called) for old, size in zip(before, sizes, strict=True)]
    return found | ({"not_adapted": refused} if refused else {})


def adapted(model: Any, lora: LoraConfig) -> Any:
    """The model with adapters. Moves are off, since a tensor without memory cannot be swapped."""
    module: Any = nn.Module
    moving = module.to
    module.to = lambda self, *_, **__: self
    try:
        with torch.device("meta"):
            return get_peft_model(model, lora)
    finally:
        module.to = moving


def _former_names(module: str, parameter: str, stacked: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    key = f"{module.replace('.base_layer', '')}.{parameter}"
    return next((names for target, names in stacked.items() if key.endswith(f".{target}")), (parameter,))


def _stacked_names(model: Any) -> dict[str, tuple[str, ...]]:
    """Map each parameter that PEFT adapts like a module to the names that PEFT accepts for it."""
    found: dict[str, tuple[str, ...]] = {}
    for names in _STACKED:
        lora = LoraConfig(target_modules=list(names))
        convert_peft_config_for_transformers(lora, model, None)
        found |= dict.fromkeys(lora.target_parameters or (), names)
    return found


def has_stacked_experts(model: Any) -> bool:
    """Whether PEFT adapts experts as parameters."""
    parameters = {last_name(name) for name, each in model.named_parameters() if each.dim() == 3}
    return not parameters.isdisjoint(_stacked_names(model))


def names_to_adapt(model: Any) -> list[str]:
    """Names of all modules and experts that an adapter computes with; empty if those are all: PEFT's "all-linear"."""
    refused = not_adapted(model)
    if not refused:
        return []
    head = model.get_output_embeddings()
    linear = {last_name(name) for name, each in model.named_modules() if is_linear(each) and each is not head}
    return sorted((linear - {*refused}).union(*_stacked_names(model).values()))


def not_adapted(model: Any) -> list[str]:
    """Names of linear layers that get no adapter: PEFT refuses them, as some of Mamba's, or fails in the first pass.

    Those return something else than a linear layer: the routers of PhiMoE and Llama 4 return the chosen experts too,
    and DeepSeek V4's grouped output projection takes each group of heads by itself.
    """
    linear = {last_name(name): each for name, each in model.named_modules() if is_linear(each)}
    unlike = [name for name, each in linear.items() if _overrides_linear(each) and not _returns_product(each)]
    return [*unlike, *(name for name in linear if name not in unlike and _is_refused(model, name))]


def _is_refused(model: Any, name: str) -> bool:
    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, name)
    except ValueError:
        return True
    return False


def _overrides_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward


def _returns_product(module: Any) -> bool:
    weight, shape = module.weight, (1, 3, module.in_features)
    try:
        with torch.no_grad():
            output = module(torch.zeros(shape, dtype=weight.dtype, device=weight.device))
    except Exception:  # of any type: it is for inputs of another shape
        return False
    return isinstance(output, torch.Tensor) and output.shape == (*shape[:2], len(weight))
