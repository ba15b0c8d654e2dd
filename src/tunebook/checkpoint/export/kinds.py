"""Write a whole model, an adapter, or an adapter merged into its base; then load the written files and compare them.

At most one model is in memory at a time. Both models compute a fixed input on the CPU. transformers loads the written
folder like any other model. Its logits must equal those of the checkpoint's weights in the same number format, bit for
bit if the machine's kernels are deterministic. If weights were cast or an adapter was merged, the root mean square
difference from the checkpoint's own logits must also stay within the format's rounding.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from tunebook.checkpoint.export.model import (
    Blueprint,
    answering,
    cpu_attention,
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
from tunebook.checkpoint.export.write import (
    as_stored,
    compare_with_model,
    refuse,
    without_tied,
    write_weights,
)
from tunebook.config.choices import PeftMethod
from tunebook.config.schema import RunConfig
from tunebook.errors import DifferenceError
from tunebook.files import sha256_file
from tunebook.model.adapters import merged, with_adapter
from tunebook.model.base_config import read_dtype
from tunebook.model.load import attention_option
from tunebook.model.tokenizer import agree_on_tokens, stop_ids
from tunebook.parallel.wrapped import format_name
from tunebook.record.run_record import RunRecord


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
    require_stops(written, stop_ids(work.blueprint.model, work.blueprint.tokenizer))
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
    settings = work.blueprint.adapter
    assert settings is not None
    hashes = write_weights(work.weights, folder, stem="adapter_model", dtype=work.dtype, place=work.place)
    settings.base_model_name_or_path = work.config.model.name or settings.base_model_name_or_path
    settings.save_pretrained(str(folder))
    work.blueprint.model.generation_config.save_pretrained(str(folder))
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
    stops = stop_ids(work.blueprint.model, work.blueprint.tokenizer)
    weights = held_weights(dict(model.state_dict()))
    refuse(compare_with_model(work.blueprint.model, weights), work.place)
    weights = without_tied(model, weights, work.place)
    convert = as_stored(model, weights)
    hashes = write_weights(weights, folder, dtype=dtype, place=work.place, convert=convert)
    count = _count(weights)
    _write_settings(work, model, folder, dtype)
    del model, weights
    gc.collect()
    written = load_written(folder, work.config)
    found = logits_of(written)
    require_stops(written, stops)
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

    return max((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: torch.finfo(dtype).eps)


_ROWS, _TOKENS = 2, 24
_FACTOR = 16  # maximum sum of roundings of one weight; bf16 was measured at 0.5 to 2
_LEAST_ALLOWED = 1e-4  # fp32: sums in another order


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison: the relative root mean square difference of the logits.

    For an adapter without its base the tensors themselves were compared.
    """

    is_exact: bool  # with the checkpoint itself
    difference: float
    allowed: float
    logits: str | None  # the input that gave the logits; None: tensors were compared


def logits_of(model: Any) -> torch.Tensor:
    """The logits of the fixed input in fp32. Shape: (2, 24, vocabulary)."""
    size = model.config.get_text_config().vocab_size
    ids = (torch.arange(_ROWS * _TOKENS).reshape(_ROWS, _TOKENS) * 7919 + 17) % size
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


class _FirstToken(LogitsProcessor):
    """Makes each row of a batch generate one token of a list."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[range(len(self.tokens)), self.tokens] = 0.0
        return forced


def require_stops(written: Any, stops: list[int]) -> None:
    """Raises: DifferenceError unless answers of the written model end at each token that ends those of the run's."""
    prompt = torch.zeros((len(stops), 1), dtype=torch.int64)
    first = LogitsProcessorList([_FirstToken(stops)])
    answers = written.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, logits_processor=first
    )
    if answers.shape[1] != 2:
        raise _differs(f"its answers do not end at each of the tokens {stops}")


def load_written(folder: Path, config: RunConfig) -> PreTrainedModel:
    """Load a written folder like any other model. Raises: DifferenceError if its weights do not fill the model."""
    loader: Any = AutoModelForCausalLM
    model, info = loader.from_pretrained(
        str(folder),
        dtype="auto",
        output_loading_info=True,
        trust_remote_code=config.model.trust_remote_code,
        attn_implementation=attention_option(cpu_attention(config)),
    )
    wrong = [*map(str, info["missing_keys"]), *map(str, info["unexpected_keys"]), *map(str, info["mismatched_keys"])]
    if wrong:
        raise _differs(f"{len(wrong)} of its weights do not fill the model: {', '.join(sorted(wrong)[:5])}")
    return answering(model)


def require_same(
    written: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, folder: Path, hashes: Mapping[str, str]
) -> None:
    """Raise a DifferenceError unless logits are finite and equal.

    Two passes of the same weights are equal bit for bit on most machines, and within one rounding of `dtype` on all
    (another order of sums). Such a difference is accepted only if the files still have the `hashes` that they were
    written with, since one damaged weight may change as little.
    """
    if not bool(written.isfinite().all()):
        raise _differs("its logits are not finite; export in the format that the run was trained in: --dtype")
    if torch.equal(written, expected):
        return
    is_rounding = _relative_difference(written, expected) <= torch.finfo(dtype).eps
    if not is_rounding or any(sha256_file(folder / name) != sha256 for name, sha256 in hashes.items()):
        raise _differs(f"its logits differ by up to {float((written - expected).abs().max()):.3g}")


def _relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The root mean square of the difference, relative to the other's."""
    return float((one - other).square().mean().sqrt() / other.square().mean().sqrt().clamp_min(1e-12))


def compare(written: torch.Tensor, own: torch.Tensor, dtype: torch.dtype) -> Comparison:
    """Compare the written model with the checkpoint itself. Raises: DifferenceError beyond the format's rounding."""
    difference = _relative_difference(written, own)
    allowed = max(_FACTOR * torch.finfo(dtype).eps, _LEAST_ALLOWED)
    if not difference <= allowed:
        raise _differs(
            f"its logits differ from the checkpoint's by {difference:.3g} (root of the mean square, relative), and "
            f"rounding to {format_name(dtype)} explains {allowed:.3g}"
        )
    where = f"{_ROWS} rows of {_TOKENS} fixed token ids, on a CPU"
    return Comparison(is_exact=torch.equal(written, own), difference=difference, allowed=allowed, logits=where)


def compare_numbers(
    written: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> Comparison:
    """Compare written tensors bit for bit with the checkpoint's, cast to `dtype` if one is given.

    Raises: DifferenceError if they differ.
    """
    expected = {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in own.items()}
    others = sorted(expected.keys() ^ written.keys())
    others += [
        name for name in sorted(expected.keys() & written.keys()) if not torch.equal(written[name], expected[name])
    ]
    if others:
        raise _differs(f"{len(others)} of its tensors are others: {', '.join(others[:5])}")
    is_exact = all(torch.equal(tensor.float(), own[name].float()) for name, tensor in written.items())
    return Comparison(is_exact=is_exact, difference=0.0, allowed=0.0, logits=None)


def _differs(what: str) -> DifferenceError:
    return DifferenceError(
        f"the exported model, loaded again, is not the checkpoint's: {what}. Nothing was kept. Try another checkpoint, "
        "and report this with the run's manifest.json",
        problem_id="export-differs",
    )
