"""Load what a chat talks to: the model on its device, the tokenizer that belongs to it, and what to say about both.

A run brings its configuration and the hashes that its tokenizer and template must have. A model without a run brings
only its folder: its own tokenizer, template and number format are taken.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.base_model import read_dtype
from tunebook.config.choices import Attention, MasterWeights, PeftMethod
from tunebook.config.frozen import load_config
from tunebook.config.schema import (
    AttentionConfig,
    DatasetConfig,
    HardwareConfig,
    ModelConfig,
    PeftSettings,
    PrecisionConfig,
    RunConfig,
    TrainingConfig,
)
from tunebook.errors import RequestError
from tunebook.evaluate.bound_model import check_tokenizer, compute_dtype, load_trained, stop_ids, uses_gpu
from tunebook.evaluate.chat.answering import ChatModel
from tunebook.evaluate.chat.target import Target
from tunebook.model.adapters import ADAPTER_FILE, is_adapter
from tunebook.model.hub import fetch_config
from tunebook.model.placement import place_on_gpus
from tunebook.model.tokenizer import load_tokenizer
from tunebook.model.tokenizer_files import VOCABULARY_FILES
from tunebook.record.files import RUN_FILE
from tunebook.record.manifest import MANIFEST_FILE

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_LIBRARIES = ("py.warnings", "transformers", "peft", "accelerate", "torch", "huggingface_hub")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready to answer."""

    model: ChatModel
    system_prompt: str | None  # that it was trained with
    notes: list[str] = field(default_factory=list)  # sentences for people: what it is and what was decided


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep warnings, log records and progress bars of the libraries out of the conversation; errors still show."""
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    levels = [logger.level for logger in loggers]
    logging.captureWarnings(True)
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def load(target: Target) -> Loaded:
    """Load a target. Raises: RequestError, DataError (another template than in training), DoesNotFitError."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # importing it set another level
    if target.run is not None:
        return _load_run(target.run, target)
    return _load_bare(target)


def _load_run(run: Path, target: Target) -> Loaded:
    config = load_config(run / RUN_FILE)
    assert target.folder is not None
    tokenizer = load_tokenizer(_tokenizer_of_run(config.model, target.folder), is_padded=False)
    check_tokenizer(run, tokenizer)
    _require_template(tokenizer, target)
    is_bound = (run / MANIFEST_FILE).is_file()
    bound = "template and tokenizer are those of the run" if is_bound else "without a manifest nothing can be compared"
    chat_model, notes = _place(config, target.folder, tokenizer, None)
    return Loaded(model=chat_model, system_prompt=config.dataset.system_prompt, notes=[*notes, bound])


def _tokenizer_of_run(model: ModelConfig, folder: Path) -> ModelConfig:
    """Where the tokenizer is: saved beside the weights, which holds wherever the run is copied, or else the base's."""
    if not _has_vocabulary(folder):
        return model
    return ModelConfig(path=str(folder), trust_remote_code=model.trust_remote_code)


def _load_bare(target: Target) -> Loaded:
    model = _model_config(target)
    try:
        if model.name is not None:
            fetch_config(model)
        tokenizer = load_tokenizer(model, is_padded=False)
        _require_template(tokenizer, target)
        dtype = _published_dtype(model)
        config = _config_of(model, dtype)
        chat_model, notes = _place(config, target.folder, tokenizer, dtype)
    except RequestError as error:
        raise _typed_for_chat(error, target) from error
    return Loaded(model=chat_model, system_prompt=None, notes=[*notes, "the model's own template, without a run"])


def _model_config(target: Target) -> ModelConfig:
    """A model that no run configures; an adapter's is its base, with the tokenizer beside the adapter if it has one."""
    if target.folder is None:
        return ModelConfig(name=target.hub_name)
    if not is_adapter(target.folder):
        return ModelConfig(path=str(target.folder))
    file = target.folder / ADAPTER_FILE
    try:
        base = str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{file} does not say which base model the adapter belongs to; copy it again, or add "
            "base_model_name_or_path",
            problem_id="adapter-without-base",
        ) from error
    tokenizer = str(target.folder) if _has_vocabulary(target.folder) else None
    if Path(base).is_dir():
        return ModelConfig(path=base, tokenizer=tokenizer)
    if base.startswith(("/", ".", "~")) or base.count("/") > 1:
        raise RequestError(
            f"the adapter's base model, {base}, is not on this machine; copy it here and correct "
            f"base_model_name_or_path in {file}",
            problem_id="adapter-without-base",
        )
    return ModelConfig(name=base, tokenizer=tokenizer)


def _published_dtype(model: ModelConfig) -> torch.dtype | None:
    """The format of a model's weights, where a GPU here computes it; a CPU computes fp32 fastest."""
    import torch

    name = read_dtype(model)
    if not torch.cuda.is_available():
        return None
    if name == "bfloat16" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float16 if name == "float16" else None


def _config_of(model: ModelConfig, dtype: torch.dtype | None) -> RunConfig:
    """A configuration with no more than loading reads."""
    import torch

    is_bf16 = dtype is torch.bfloat16
    return RunConfig(
        model=model,
        dataset=DatasetConfig(),
        hardware=HardwareConfig(),
        precision=PrecisionConfig(master_weights=MasterWeights.bf16 if is_bf16 else MasterWeights.fp32),
        attention=AttentionConfig(implementation=Attention.sdpa),
        peft=PeftSettings(method=PeftMethod.lora),
        training=TrainingConfig(),
    )


def _place(
    config: RunConfig, folder: Path | None, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | None
) -> tuple[ChatModel, list[str]]:
    """The model where it answers, its weights in `dtype` if one is given, and what to say about it."""
    import torch

    model: Any = load_trained(config, folder)
    if dtype is not None:
        model = model.to(dtype)
    autocast = compute_dtype(config)
    note = None
    if uses_gpu(config):
        if autocast is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            autocast = None  # trained on a newer GPU: in fp32 nothing is lost
        model, note = place_on_gpus(model, autocast)
    else:
        autocast = None  # a CPU computes in the weights' own format fastest
    chat_model = ChatModel(model, tokenizer, stop_ids=stop_ids(model, tokenizer), autocast_dtype=autocast)
    return chat_model, [f"{chat_model.device} in {chat_model.format}"] + ([note] if note else [])


def _has_vocabulary(folder: Path) -> bool:
    return any((folder / name).is_file() for name in VOCABULARY_FILES)


def _require_template(tokenizer: PreTrainedTokenizerBase, target: Target) -> None:
    if tokenizer.chat_template:
        return
    raise RequestError(
        f"the tokenizer of {target.name} has no chat template, so a conversation cannot be written as this model reads "
        "it: it is a base model or was trained on plain text. Name the instruction-tuned version, or a run that was "
        "trained on conversations; if you know its template, save it as chat_template.jinja beside the tokenizer",
        problem_id="tokenizer-no-template",
    )


def _typed_for_chat(error: RequestError, target: Target) -> RequestError:
    """The same error with what can be typed here: a chat takes no overrides."""
    if error.problem_id == "hub-out-of-reach":
        return RequestError(
            f"there is no run or folder {target.name} here, and the hub is out of reach with no copy of it in the "
            f"cache. On a machine with network run `hf download {target.name} --local-dir DIR`, copy DIR here and "
            "type: tunebook chat DIR",
            problem_id="hub-out-of-reach",
        )
    if error.problem_id == "remote-code-refused":
        return RequestError(
            f"{target.name} brings Python code of its own, which `tunebook chat` does not run; name a model of an "
            "architecture that transformers has, or a run that was trained with model.trust_remote_code=true",
            problem_id="remote-code-refused",
        )
    if target.hub_name is not None:
        return RequestError(
            f"there is no run or folder {target.name} here, and on the hub: {error.message}",
            problem_id=error.problem_id,
        )
    if "model." not in error.message:
        return error
    return RequestError(
        f"{error.message}. (`tunebook chat` takes no overrides: set it in the model's own folder, in "
        "tokenizer_config.json)",
        problem_id=error.problem_id,
    )
