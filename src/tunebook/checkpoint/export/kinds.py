"""Write a whole model, an adapter, or an adapter merged into its base; then load the written files and compare them.

At most one model is in memory at a time.
"""

from __future__ import annotations

import gc
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.checkpoint.export.check import (
    Comparison,
    compare,
    compare_numbers,
    load_written,
    logits_of,
    require_same,
)
from tunebook.checkpoint.export.model import (
    Blueprint,
    answering,
    filled,
    in_format,
    load_base,
    load_dequantized_base,
    load_folder,
    with_trained,
    without_weights,
)
from tunebook.checkpoint.export.source import Form, Source, Stored
from tunebook.checkpoint.export.stored_weights import Weights, held_weights
from tunebook.checkpoint.export.write import as_stored, compare_with_model, refuse, without_tied, write_weights
from tunebook.config.choices import PeftMethod
from tunebook.config.schema import RunConfig
from tunebook.model.adapters import merged, with_adapter
from tunebook.model.base_config import read_dtype
from tunebook.model.tokenizer import agree_on_tokens
from tunebook.record.run_record import RunRecord

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Work:
    """An accepted export request."""

    run: RunRecord
    config: RunConfig
    source: Source
    stored: Stored
    blueprint: Blueprint
    weights: Weights
    dtype: torch.dtype | None  # the format to write; None: as stored
    is_merged: bool
    has_base: bool = True  # whether the weights that an adapter was trained on are available

    @property
    def is_adapter(self) -> bool:
        """Whether an adapter is written."""
        return self.blueprint.adapter is not None and not self.is_merged

    @property
    def place(self) -> str:
        """Where the weights come from, for messages."""
        return str(self.source.folder)


@dataclass(frozen=True, kw_only=True)
class Written:
    """The written files, and how they compare with the checkpoint."""

    hashes: dict[str, str]  # SHA-256 by file
    num_parameters: int
    check: Comparison
    base_was_dequantized: bool = False


def base_dtype(config: RunConfig) -> torch.dtype | None:
    """The number format that the base model was published in; None if unknown."""
    import torch

    name = read_dtype(config.model)
    found: torch.dtype | None = getattr(torch, name) if name is not None else None
    return found


def write_whole(work: Work, folder: Path) -> Written:
    """Export a fully trained model. Raises: RequestError for its weights, DifferenceError for the written files."""
    weights = without_tied(work.blueprint.model, work.weights, work.place)
    convert = as_stored(work.blueprint.model, weights)
    hashes = write_weights(weights, folder, dtype=work.dtype, place=work.place, convert=convert)
    dtype = work.dtype or _most_frequent(work.weights)
    _write_settings(work, work.blueprint.model, folder, dtype)
    written = load_written(folder, work.config)
    found = logits_of(written)
    formats = {name: parameter.dtype for name, parameter in written.named_parameters()}
    del written
    gc.collect()
    reference = _reference(work)
    own = logits_of(reference)
    for name, parameter in reference.named_parameters():
        parameter.data = parameter.data.to(formats[name])
    narrowest = _narrowest(list(formats.values()))
    require_same(found, logits_of(reference), narrowest, folder, hashes)
    check = compare(found, own, narrowest)
    return Written(hashes=hashes, num_parameters=_count(weights), check=check)


def write_adapter(work: Work, folder: Path) -> Written:
    """Export an adapter in PEFT's layout, compared on top of its base in the base's format. Raises: as `write_whole`.

    Without its base the tensors themselves are compared.
    """
    import torch
    from safetensors.torch import load_file

    settings = work.blueprint.adapter
    assert settings is not None
    hashes = write_weights(work.weights, folder, stem="adapter_model", dtype=work.dtype, place=work.place)
    settings.base_model_name_or_path = work.config.model.name or settings.base_model_name_or_path
    settings.save_pretrained(str(folder))
    work.blueprint.tokenizer.save_pretrained(str(folder))
    count = _count(work.weights)
    if not work.has_base:
        stored: dict[str, torch.Tensor] = {}
        for file in folder.glob("adapter_model*.safetensors"):
            stored |= load_file(file)
        return Written(
            hashes=hashes,
            num_parameters=count,
            check=compare_numbers(stored, {name: one.load() for name, one in work.weights.items()}, work.dtype),
        )
    dtype = base_dtype(work.config) or torch.float32
    adapted = with_trained(load_base(work.config, dtype), settings, work.weights)
    own = logits_of(adapted)
    del adapted
    gc.collect()
    written = with_adapter(load_base(work.config, dtype), folder, PeftMethod.qlora)  # not merged
    found = logits_of(answering(written))
    if work.dtype is None:
        require_same(found, own, dtype, folder, hashes)
    check = compare(found, own, _narrowest([work.dtype or dtype, dtype]))
    return Written(hashes=hashes, num_parameters=count, check=check)


def write_merged(work: Work, folder: Path) -> Written:
    """Export an adapter merged into its base, for QLoRA quantized to 4 bits and back. Raises: as `write_whole`."""
    import torch

    dtype = work.dtype or torch.float32
    is_quantized = work.config.peft.method is PeftMethod.qlora
    base = load_dequantized_base(work.config, dtype) if is_quantized else load_base(work.config, dtype)
    assert work.blueprint.adapter is not None
    adapted = with_trained(base, work.blueprint.adapter, work.weights)
    own = logits_of(adapted)
    model: Any = in_format(merged(adapted), dtype)
    del base, adapted
    expected = logits_of(model)
    agree_on_tokens(model, work.blueprint.tokenizer)
    weights = held_weights(dict(model.state_dict()))
    refuse(compare_with_model(work.blueprint.model, weights), work.place)
    weights = without_tied(model, weights, work.place)
    convert = as_stored(model, weights)
    hashes = write_weights(weights, folder, dtype=dtype, place=work.place, convert=convert)
    count = _count(weights)
    _write_settings(work, model, folder, dtype)
    del model, weights
    gc.collect()
    found = logits_of(load_written(folder, work.config))
    require_same(found, expected, dtype, folder, hashes)
    check = compare(found, own, dtype)
    return Written(hashes=hashes, num_parameters=count, check=check, base_was_dequantized=is_quantized)


def _reference(work: Work) -> Any:
    """The checkpoint's own model in its own number format, from its own files."""
    model = without_weights(work.blueprint.model.config, work.config)
    if work.stored.form is Form.whole and not set(work.weights) <= set(model.state_dict()):
        # Stored names may be older ones or refer to parts of the model's tensors: transformers converts them.
        return load_folder(work.source.folder, work.config, _most_frequent(work.weights))
    return filled(model, work.weights)


def _write_settings(work: Work, model: Any, folder: Path, dtype: torch.dtype) -> None:
    """config.json, generation_config.json, the tokenizer and its template, and the model's own code."""
    model.config.dtype = dtype
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(str(folder))
    model.generation_config.save_pretrained(str(folder))
    work.blueprint.tokenizer.save_pretrained(str(folder))
    if work.config.model.trust_remote_code:
        for file in work.source.folder.glob("*.py"):
            shutil.copy2(file, folder)


def _count(weights: Weights) -> int:
    return sum(tensor.num_parameters for tensor in weights.values())


def _most_frequent(weights: Weights) -> torch.dtype:
    dtypes = [tensor.dtype for tensor in weights.values()]
    return max(dict.fromkeys(dtypes), key=dtypes.count)


def _narrowest(dtypes: list[torch.dtype]) -> torch.dtype:
    import torch

    return max((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: torch.finfo(dtype).eps)
