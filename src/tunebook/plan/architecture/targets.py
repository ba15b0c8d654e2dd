"""The layers that PEFT puts adapters on, by the names that `peft.target_modules` uses for them.

For PEFT, experts that transformers 5 keeps stacked, and their router, are parameters rather than linear layers. PEFT
finds them by the former names of each expert's linear layers. If two of those layers are now one parameter, both names
match it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from tunebook.config.model_facts import PROJECTORS, is_in_modules
from tunebook.model.parameters import last_name

# Names of the linear layers of experts and of a router before they were stacked, grouped by their current parameter.
_STACKED = (("w1", "w3"), ("w2",), ("gate_proj", "up_proj"), ("down_proj",), ("gate",))


def is_linear(module: nn.Module) -> bool:
    """Whether PEFT's "all-linear" includes the module; GPT-2's Conv1D, a transposed linear layer, counts."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def adapters_of(model: Any, unreached: Collection[str]) -> dict[str, Any]:
    """What `LayerFacts` says about adapters, on the layers that text reaches and on those of images.

    An adapter of rank 1 has as many parameters as its weight has rows and columns, for each expert.
    """
    stacked, head = _stacked_names(model), model.get_output_embeddings()
    of_experts = {*itertools.chain(*stacked.values())}  # PEFT does not adapt other layers with these names
    linear: dict[str, list[int]] = {}
    vision: dict[str, list[int]] = {}
    projector: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        is_adapted = is_linear(module) and module is not head and last_name(name) not in of_experts
        if is_adapted:
            rows, columns = module.weight.shape
            of_images = vision if {*name.split(".")}.isdisjoint(PROJECTORS) else projector
            found = of_images if is_in_modules(unreached, name) else linear
            _add(found, [last_name(name)], (columns, rows) if isinstance(module, nn.Linear) else (rows, columns))
    experts: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        names = next((names for target, names in stacked.items() if name.endswith(f".{target}")), ())
        if names and not is_in_modules(unreached, name):
            rows, columns = parameter.shape[-2:]
            number = parameter.numel() // (rows * columns)
            _add(experts, names, (number * columns, number * rows))
    of_parts = {"vision_adapters": vision, "projector_adapters": projector}
    return {"adapters": linear, "expert_adapters": experts} | of_parts


def _add(found: dict[str, list[int]], names: Iterable[str], sizes: tuple[int, int]) -> None:
    for name in names:
        inputs, outputs = found.get(name, (0, 0))
        found[name] = [inputs + sizes[0], outputs + sizes[1]]


def _stacked_names(model: Any) -> dict[str, tuple[str, ...]]:
    """Map each parameter that PEFT adapts like a module to the names that PEFT accepts for it."""
    found: dict[str, tuple[str, ...]] = {}
    for names in _STACKED:
        lora = LoraConfig(target_modules=list(names))
        convert_peft_config_for_transformers(lora, model, None)
        found |= dict.fromkeys(lora.target_parameters or (), names)
    return found
