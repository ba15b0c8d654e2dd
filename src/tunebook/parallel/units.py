"""Which modules of a model become FSDP units: the parts whose parameters are gathered together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from tunebook.config.choices import WrapPolicy
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.model.blocks import transformer_blocks
from tunebook.parallel.fsdp import fsdp_of

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward pass that could be hooked


def unit_classes(config: RunConfig, model: nn.Module) -> list[str]:
    """The classes whose instances become units, apart from the embeddings, the last norm and the head.

    Raises: RequestError if the model has no such class, or none as large as `wrap_min_num_parameters`.
    """
    fsdp = fsdp_of(config)
    if fsdp.wrap_policy is WrapPolicy.size:
        return _with_blocks(classes_by_size(model, fsdp.wrap_min_num_parameters), model)
    present = {type(module).__name__ for module in model.modules()}
    blocks = _block_classes(model)
    unknown = [name for name in fsdp.wrap_classes if name not in present]
    if unknown or not (fsdp.wrap_classes or blocks):
        says = f"{type(model).__name__} has no {', '.join(unknown)}" if unknown else "no block of the model is known"
        known = blocks or sorted(name for name in present if "Layer" in name or "Block" in name) or sorted(present)
        raise RequestError(
            f"parallelism.wrap_classes={fsdp.wrap_classes}: {says}, and FSDP would gather all of it at once; name the "
            f"class of one transformer block, such as parallelism.wrap_classes=[{known[0]}]",
            problem_id="wrap-class-unknown",
        )
    return list(fsdp.wrap_classes) or blocks


def _with_blocks(units: list[str], model: nn.Module) -> list[str]:
    """Add the blocks to the units if blocks contain parameters outside of the units.

    Such parameters would belong to the root, which FSDP gathers first and keeps until the end of the step. For
    Llama-3-8B with its MLPs as units of 100 million parameters, that is the attention of all layers, 1.3 billion.
    """
    blocks = transformer_blocks(model).values()
    inside = {part for unit in model.modules() if type(unit).__name__ in units for part in unit.modules()}
    is_whole = all(part in inside for block in blocks for part in block.modules() if [*part.parameters(recurse=False)])
    return units if is_whole else sorted({*units, *_block_classes(model)})


def _block_classes(model: nn.Module) -> list[str]:
    return sorted({type(block).__name__ for block in transformer_blocks(model).values()})


def classes_by_size(model: nn.Module, min_num_parameters: int) -> list[str]:
    """The innermost classes whose instances all have at least that many parameters.

    accelerate's size policy picks instances and fails on every list of layers, so its policy for transformer blocks
    gets these classes.
    """
    smallest: dict[str, int] = {}
    inside: dict[str, set[str]] = {}
    for module in _candidates(model):
        name = type(module).__name__
        size = sum(parameter.numel() for parameter in module.parameters())
        smallest[name] = min(size, smallest.get(name, size))
        inside.setdefault(name, set()).update(type(child).__name__ for child in module.modules() if child is not module)
    large = {name for name, size in smallest.items() if size >= min_num_parameters}
    if not large:
        largest = max(smallest, key=lambda name: smallest[name])
        raise RequestError(
            f"parallelism.wrap_min_num_parameters={min_num_parameters:,}: no part of the model is that large; its "
            f"largest kind, {largest}, has {smallest[largest]:,} parameters. Try parallelism.wrap_min_num_parameters="
            f"{smallest[largest]} or parallelism.wrap_policy=transformer",
            problem_id="units-too-large",
        )
    return sorted(name for name in large if not inside[name] & large)


def _candidates(model: Any) -> Iterable[nn.Module]:
    """Modules that can be units: no containers, and neither the embeddings nor their parents, which are units already.

    Single layers are excluded too, except stacked experts. A head that shares the embeddings' weight would be a unit of
    its own, with which FSDP fails in the first step. torch 2.13 warns about units that return views, as linear layers.
    """
    embeddings = {model.get_input_embeddings(), model.get_output_embeddings()}
    for module in model.modules():
        if not isinstance(module, _CONTAINERS) and not _is_single(module) and not embeddings & set(module.modules()):
            yield module


def _is_single(module: nn.Module) -> bool:
    return not [*module.children()] and all(parameter.dim() < 3 for parameter in module.parameters())
