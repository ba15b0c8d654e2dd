"""The names and shapes of stored weights, from the files' headers, and whether they fill a model.

Reading headers takes milliseconds and no memory, so every rank does it before any weight is read. safetensors checks a
file's length when it opens it, which detects an incomplete download.

The libraries cannot be asked whether weights fill a model: under ZeRO-3 transformers 5.23 reports "for now we assume
only best-case scenario with deepspeed" (`modeling_utils._load_pretrained_model`),
and PEFT only warns about an adapter without a layer. How stored names become the model's (older names, a missing
prefix, experts stored one by one) is transformers' own knowledge and is asked there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tunebook.errors import RequestError, first_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedModel

Shapes = dict[str, tuple[int, ...]]  # by the weight's name in the file

# What transformers looks for in a model's folder, in its order (modeling_utils._get_resolved_checkpoint_files, 5.23).
SINGLE_AND_INDEX = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")  # all that may be weights of a model's folder
STORED_PATTERNS = (
    ("model*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
)


def find_weight_files(folder: Path) -> list[Path]:
    """The files from which transformers reads the weights of a model's folder; empty if there are none.

    Raises: RequestError for an index that cannot be read or names a missing file.
    """
    for single, index in SINGLE_AND_INDEX:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _files_of_index(folder / index)
    return []


def _files_of_index(index: Path) -> list[Path]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [index.parent / name for name in sorted(set(places.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged_file(index, error) from error
    absent = [file for file in files if not file.is_file()]
    if absent:
        num_weights = sum(place == absent[0].name for place in places.values())
        raise RequestError(
            f"{index} names {len(files)} files and {len(absent)} of them {'is' if len(absent) == 1 else 'are'} not "
            f"there: {absent[0]} should hold {num_weights} weights, which would be random without it; copy the missing "
            "files or download the model again",
            problem_id="weights-file-missing",
        )
    return files


def read_shapes(files: Iterable[Path]) -> Shapes:
    """The name and shape of every weight in some files. Raises: RequestError for a damaged or incomplete file."""
    shapes: Shapes = {}
    for file in files:
        try:
            shapes |= _in_safetensors(file) if file.suffix == ".safetensors" else _in_pickle(file)
        except Exception as error:  # safetensors, torch and zipfile each have their own errors
            raise damaged_file(file, error) from error
    return shapes


def _in_safetensors(file: Path) -> Shapes:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as weights:
        return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118  no mapping


def _in_pickle(file: Path) -> Shapes:
    import torch

    weights: dict[str, Any] = torch.load(file, map_location="meta", weights_only=True)
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def damaged_file(
    file: Path, error: Exception | str, advice: str = "it is damaged or was cut off. Copy or download it again"
) -> RequestError:
    """The error for a file of weights that cannot be read."""
    size = f"{file.stat().st_size:,} bytes" if file.is_file() else "not there"
    reason = error if isinstance(error, str) else first_line(error)
    return RequestError(f"{file} ({size}) cannot be read: {reason}; {advice}", problem_id="weights-file-damaged")


def check_stored_weights(model: PreTrainedModel, folder: Path) -> None:
    """Compare a model, with or without weights, with the weights in a folder.

    Quantized weights are not compared, since their names are their library's. Raises: RequestError for missing or
    damaged files, and for weights that are missing, unexpected, or of another shape.
    """
    files = find_weight_files(folder)
    if files and getattr(model.config, "quantization_config", None) is None:
        require_complete(**compare_shapes(model, read_shapes(files)), place=str(folder))


def compare_shapes(model: PreTrainedModel, stored: Shapes) -> dict[str, list[str]]:
    """The `missing`, `unexpected` and `mismatched` weights, without those that the architecture allows to be."""
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
    # Tied weights are one tensor, stored under one or both of their names.
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
    """A function from a stored name to the model's names, and whether the values are converted.

    As in `transformers.core_model_loading.convert_and_load_state_dict_in_model` (the same in 5.17 and 5.23).
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
    """Raises: RequestError if a list is not empty; `place` is where the weights are."""
    kinds = {"missing keys": missing, "mismatched keys": mismatched, "unexpected keys": unexpected}
    found = [f"{len(keys)} {kind} such as {keys[0]}" for kind, keys in kinds.items() if keys]
    if found:
        raise RequestError(
            f"the weights in {place} do not fill the model: {'; '.join(found)}; a missing weight would be random. "
            "Name a complete checkpoint of this architecture",
            problem_id="weights-incomplete",
        )
