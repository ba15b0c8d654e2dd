"""The layers that PEFT puts adapters on, by the names that `peft.target_modules` uses for them.

For PEFT, experts that transformers 5 keeps stacked, and their router, are parameters rather than linear layers. PEFT
finds them by the former names of each expert's linear layers. If two of those layers are now one parameter, both names
match it.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from tunebook.model.parameters import last_name

Sizes = dict[str, list[int]]  # by name: total inputs and outputs

# Names of the linear layers of experts and of a router before they were stacked, grouped by their current parameter.
_STACKED = (("w1", "w3"), ("w2",), ("gate_proj", "up_proj"), ("down_proj",), ("gate",))


def is_linear(module: nn.Module) -> bool:
    """Whether PEFT's "all-linear" includes the module; GPT-2's Conv1D, a transposed linear layer, counts."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def num_inputs(module: Any) -> int:
    """Number of inputs per token of a linear layer."""
    rows, columns = module.weight.shape
    return int(columns if isinstance(module, nn.Linear) else rows)


def sizes_of_adapted(wrapped: Any, stacked: dict[str, tuple[str, ...]]) -> tuple[Sizes, Sizes]:
    """Sizes of linear layers, and of experts and routers, that have an adapter of rank 1.

    Experts and routers have theirs as parameters. `stacked` describes the model before it had adapters.
    """
    linear: Sizes = {}
    experts: Sizes = {}
    for name, module in wrapped.named_modules():
        if not getattr(module, "lora_A", None):
            continue
        inputs, outputs = (part["default"].weight.numel() for part in (module.lora_A, module.lora_B))
        parameter = getattr(module, "parameter_name", None)
        names = (last_name(name),) if parameter is None else _names(name, parameter, stacked)
        found = linear if parameter is None else experts
        for each in names:
            _add(found, each, inputs // len(names), outputs // len(names))
    return linear, experts


def stacked_names(model: Any) -> dict[str, tuple[str, ...]]:
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
    return not parameters.isdisjoint(stacked_names(model))


def names_beside_experts(model: Any) -> list[str]:
    """Names of the modules that PEFT adapts as linear layers, without the output head."""
    taken = {name for names in stacked_names(model).values() for name in names}
    head = model.get_output_embeddings()
    linear = {last_name(name) for name, each in model.named_modules() if is_linear(each) and each is not head}
    return sorted(linear - taken - {*not_adapted(model, model)})


def names_to_adapt(model: Any) -> list[str]:
    """Names of all modules and experts that an adapter computes with; empty if those are all: PEFT's "all-linear"."""
    if not not_adapted(model, model):
        return []
    return sorted({*names_beside_experts(model)}.union(*stacked_names(model).values()))


def not_adapted(model: Any, layers: nn.Module) -> list[str]:
    """Names of a model's linear layers that get no adapter: PEFT refuses them, as some of Mamba's, or fails later."""
    names = dict.fromkeys(last_name(name) for name, each in layers.named_modules() if is_linear(each))
    return [*unlike_linear(layers), *(name for name in names if _is_refused(model, name))]


def _is_refused(model: Any, name: str) -> bool:
    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, name)
    except ValueError:
        return True
    return False


def unlike_linear(layers: nn.Module) -> list[str]:
    """Names of linear layers that return something else than a linear layer.

    The routers of PhiMoE and Llama 4 return the chosen experts too, and DeepSeek V4's grouped output projection takes
    each group of heads by itself. PEFT 0.21 puts an adapter on them, which fails in the first pass.
    """
    found = {last_name(name): each for name, each in layers.named_modules() if _overrides_linear(each)}
    return [name for name, each in found.items() if not _returns_product(each)]


def _overrides_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward


def _returns_product(module: Any) -> bool:
    weight, shape = module.weight, (1, 3, num_inputs(module))
    try:
        with torch.no_grad():
            output = module(torch.zeros(shape, dtype=weight.dtype, device=weight.device))
    except Exception:  # of any type: it is for inputs of another shape
        return False
    return isinstance(output, torch.Tensor) and output.shape == (*shape[:2], len(weight))


def _names(module: str, parameter: str, stacked: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    key = f"{module.replace('.base_layer', '')}.{parameter}"
    return next((names for target, names in stacked.items() if key.endswith(f".{target}")), (parameter,))


def _add(sizes: Sizes, name: str, inputs: int, outputs: int) -> None:
    before = sizes.get(name, [0, 0])
    sizes[name] = [before[0] + inputs, before[1] + outputs]
