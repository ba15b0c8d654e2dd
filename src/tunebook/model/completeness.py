"""Do stored weights fill a model, all of it and nothing else? Compared by name and shape before any is read.

The libraries cannot be asked: under ZeRO-3 transformers 5.23 reports "for now we assume only best-case scenario with
deepspeed, i.e. perfectly matching checkpoints" (`modeling_utils._load_pretrained_model`), and a PEFT adapter that lacks
a layer only warns. How stored names become the model's (older names, a missing prefix, experts stored one by one) is
transformers' own knowledge and asked for there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tunebook.errors import RequestError
from tunebook.model.weight_files import Shapes, find_weight_files, read_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_stored_weights(model: PreTrainedModel, folder: Path) -> None:
    """Compare a model of any weights, or of none, with those stored in a folder.

    Nothing is said of a folder without weights, nor of weights that are stored quantised: their names are their
    library's. Raises: RequestError for files that are missing or damaged, for weights that are missing, unexpected, or
    of another shape.
    """
    files = find_weight_files(folder)
    if files and getattr(model.config, "quantization_config", None) is None:
        require_complete(**compare_shapes(model, read_shapes(files)), place=str(folder))


def compare_shapes(model: PreTrainedModel, stored: Shapes) -> dict[str, list[str]]:
    """What is `missing`, `unexpected` and `mismatched`, without what the architecture says may be absent or extra."""
    expected = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    targets_of = _renaming(model, expected)
    filled: set[str] = set()
    unexpected: set[str] = set()
    mismatched: list[str] = []
    for name, shape in stored.items():
        targets, is_converted = targets_of(name)
        filled.update(targets)
        if not targets:
            unexpected.add(name)
        elif not is_converted and shape != expected[targets[0]]:
            mismatched.append(f"{name} of shape {list(shape)}, where the model has {list(expected[targets[0]])}")
    # Tied weights are one tensor: stored under one of their names, or under each.
    pairs = [{first, second} for first, second in model.all_tied_weights_keys.items()]
    missing = set(expected) - filled - {name for pair in pairs if pair & filled for name in pair}
    ignorable: Any = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
    model._adjust_missing_and_unexpected_keys(ignorable)
    return {
        "missing": sorted(ignorable.missing_keys),
        "unexpected": sorted(ignorable.unexpected_keys),
        "mismatched": sorted(mismatched),
    }


def _renaming(model: PreTrainedModel, expected: Shapes) -> Callable[[str], tuple[list[str], bool]]:
    """From a stored name to the model's names that it fills, and whether its values are changed on the way.

    As `transformers.core_model_loading.convert_and_load_state_dict_in_model` does it (the same in 5.17 and 5.23).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    known = get_model_conversion_mapping(model)
    renamings = [entry for entry in known if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in known if isinstance(entry, WeightConverter)]
    prefix: Any = model.base_model_prefix
    state: Any = expected

    def targets_of(name: str) -> tuple[list[str], bool]:
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in expected and name in expected:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in expected:
            return [], False
        if pattern is None:
            return [target], False
        converter = next(entry for entry in converters if pattern in entry.source_patterns)
        first = converter.target_patterns[0]
        return [target.replace(first, other) for other in converter.target_patterns], True

    return targets_of


def require_complete(*, missing: list[str], unexpected: list[str], mismatched: list[str], place: str) -> None:
    """Raise a RequestError that names what is wrong with the weights of a place."""
    kinds = {"missing keys": missing, "mismatched keys": mismatched, "unexpected keys": unexpected}
    found = [f"{len(keys)} {kind} such as {keys[0]}" for kind, keys in kinds.items() if keys]
    if found:
        raise RequestError(
            f"the weights in {place} do not fill the model: {'; '.join(found)}; a missing weight would be random. "
            "Name a complete checkpoint of this architecture",
            problem_id="weights-incomplete",
        )
