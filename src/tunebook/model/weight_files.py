"""The names and shapes of stored weights, from the files' headers, and whether they fill a model.

Reading headers takes milliseconds and no memory, so every rank does it before any weight is read. safetensors checks a
file's length when it opens it, which detects an incomplete download.

The weights are compared before a strategy is set: under ZeRO-3 transformers 5.23 reports no unexpected or mismatched
weights (`modeling_utils._load_pretrained_model`). PEFT only warns about an adapter without a layer.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.book import resolve_path
from tunebook.config.choices import Weights
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError, first_line
from tunebook.files import remembered_hashes, sha256_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedModel

Shapes = dict[str, tuple[int, ...]]  # by the weight's name in the file

# What transformers looks for in a model's folder, in its order (modeling_utils._get_resolved_checkpoint_files, 5.23):
# one file, or an index of those that match the pattern.
STORED = (
    ("model.safetensors", "model.safetensors.index.json", "model*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin"),
)
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")  # all that may be weights of a model's folder


def find_weight_files(folder: Path) -> list[Path]:
    """The files from which transformers reads the weights of a model's folder; empty if there are none.

    Raises: RequestError for an index that cannot be read or names a missing file.
    """
    for single, index, _ in STORED:
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
        raise _damaged_file(index, error) from error
    if absent := [file for file in files if not file.is_file()]:
        raise RequestError(
            f"{index} names {len(files)} files, and {len(absent)} are missing, such as {absent[0]}; copy the missing "
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
            raise _damaged_file(file, error) from error
    return shapes


def _in_safetensors(file: Path) -> Shapes:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as weights:
        return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118  no mapping


def _in_pickle(file: Path) -> Shapes:
    import torch

    weights: dict[str, Any] = torch.load(file, map_location="meta", weights_only=True)
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _damaged_file(file: Path, error: Exception) -> RequestError:
    size = f"{file.stat().st_size:,} bytes" if file.is_file() else "not there"
    return RequestError(
        f"{file} ({size}) cannot be read: {first_line(error)}; it is damaged or was cut off. Copy or download it again",
        problem_id="weights-file-damaged",
    )


def check_stored_weights(model: PreTrainedModel, folder: Path) -> None:
    """Compare a model, with or without weights, with the weights in a folder.

    Quantized weights are not compared, since their names are their library's. Raises: RequestError for missing or
    damaged files, and for weights that are missing, unexpected, or of another shape.
    """
    files = find_weight_files(folder)
    if files and getattr(model.config, "quantization_config", None) is None:
        require_complete(**compare_shapes(model, read_shapes(files)), place=str(folder))


def compare_shapes(model: PreTrainedModel, stored: Shapes) -> dict[str, list[str]]:
    """The `missing`, `unexpected` and `mismatched` weights by transformers' own report, loading tensors without memory.

    It knows older names, missing prefixes, tied weights, experts that are stored one by one, and what may be missing.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    weights = {name: torch.empty(shape, device="meta") for name, shape in stored.items()}
    loader: Any = type(model)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    _, report = loader.from_pretrained(
        None,
        config=copy.deepcopy(model.config),
        state_dict=weights,
        device_map={"": "meta"},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    return {
        "missing": sorted(report["missing_keys"]),
        "unexpected": sorted(report["unexpected_keys"]),
        "mismatched": [
            f"{name} of shape {list(shape)}, where the model has {list(expected)}"
            for name, shape, expected in sorted(report["mismatched_keys"])
        ],
    }


def require_complete(*, missing: list[str], unexpected: list[str], mismatched: list[str], place: str) -> None:
    """Raises: RequestError if a list is not empty; `place` is where the weights are."""
    kinds = {"missing keys": missing, "mismatched keys": mismatched, "unexpected keys": unexpected}
    problems = [f"{len(keys)} {kind} such as {keys[0]}" for kind, keys in kinds.items() if keys]
    if problems:
        raise RequestError(
            f"the weights in {place} do not fill the model: {'; '.join(problems)}; a missing weight would be random. "
            "Name a complete checkpoint of this architecture",
            problem_id="weights-incomplete",
        )


def weights_fingerprint(model: ModelConfig) -> str | None:
    """A fingerprint of the pretrained weights in a model's folder: of one file its SHA-256, as the hub shows it.

    It shows whether a base model is the one that an adapter was trained on, or that a run started from; config.json
    only identifies the architecture. All files are read the first time, then only those that changed. None for random
    weights (known by their seed), hub models (known by their revision) and folders without weights.
    Raises: RequestError for files that are missing.
    """
    if model.path is None or model.weights is not Weights.pretrained:
        return None
    hashes = [*remembered_hashes(find_weight_files(resolve_path(model.path))).values()]
    if not hashes:
        return None
    return hashes[0] if len(hashes) == 1 else sha256_text("\n".join(hashes))
