"""Load what a chat talks to: the model on its device, the tokenizer that belongs to it, and what to say about both.

A run brings its configuration and the hashes that its tokenizer and template must have. A model without a run brings
only its folder: its own tokenizer, template and number format are taken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.frozen import load_config
from tunebook.config.schema import ModelConfig, RunConfig
from tunebook.errors import RequestError
from tunebook.evaluate.bare_model import config_of, model_config, without_overrides
from tunebook.evaluate.bound_model import compute_dtype, load_trained, stop_ids, tokenizer_of_run, uses_gpu
from tunebook.evaluate.chat.answering import ChatModel
from tunebook.evaluate.target import Target
from tunebook.model.adapters import is_adapter
from tunebook.model.base_config import read_dtype
from tunebook.model.hub import fetch_config
from tunebook.model.placement import place_on_gpus
from tunebook.model.tokenizer import load_tokenizer
from tunebook.record.binding import (
    Trained,
    check_base,
    check_bound,
    recorded_by_origin,
    recorded_by_run,
    uncompared_base,
)
from tunebook.record.files import RUN_FILE

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_UNBOUND = "the model's own template, without a run"
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
    tokenizer = load_tokenizer(tokenizer_of_run(config.model, target.folder), is_padded=False)
    trained = recorded_by_run(run)
    check_bound(trained, tokenizer, config.dataset.system_prompt)
    said: list[str] = []
    if is_adapter(target.folder):
        said = _check_base(trained, config.model)
    _require_template(tokenizer, target)
    bound = "template and tokenizer are those of the run" if trained else "without a manifest nothing can be compared"
    chat_model, notes = _place(config, target.folder, tokenizer, None)
    return Loaded(model=chat_model, system_prompt=config.dataset.system_prompt, notes=[*notes, *said, bound])


def _load_bare(target: Target) -> Loaded:
    import torch

    origin = target.origin
    model = model_config(target)
    said: list[str] = []
    try:
        if model.name is not None:
            fetch_config(model)
        tokenizer = load_tokenizer(model, is_padded=False)
        if origin is not None:
            trained = recorded_by_origin(origin)
            check_bound(trained, tokenizer, origin.system_prompt)
            if target.folder is not None and is_adapter(target.folder):
                said = _check_base(trained, model)
        _require_template(tokenizer, target)
        dtype = _published_dtype(model)
        config = config_of(model, is_bf16=dtype is torch.bfloat16)
        chat_model, notes = _place(config, target.folder, tokenizer, dtype)
    except RequestError as error:
        raise without_overrides(error, target, "tunebook chat ") from error
    bound = f"template and tokenizer are those of the run {origin.run}" if origin else _UNBOUND
    prompt = origin.system_prompt if origin else None
    return Loaded(model=chat_model, system_prompt=prompt, notes=[*notes, *said, bound])


def _check_base(trained: Trained | None, model: ModelConfig) -> list[str]:
    """What there is to say of an adapter's base. Raises: DataError for another one, RequestError."""
    check_base(trained, model)
    note = uncompared_base(trained, model)
    return [] if note is None else [note]


def _published_dtype(model: ModelConfig) -> torch.dtype | None:
    """The format of a model's weights, where a GPU here computes it; a CPU computes fp32 fastest."""
    import torch

    name = read_dtype(model)
    if not torch.cuda.is_available():
        return None
    if name == "bfloat16" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float16 if name == "float16" else None


def _place(
    config: RunConfig, folder: Path | None, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | None
) -> tuple[ChatModel, list[str]]:
    """The model where it answers, its weights in `dtype` if one is given, and what to say about it."""
    import torch

    from tunebook.evaluate.on_gpu import SHARE_FOR_COPIES_OF_ONE, choose_copies

    model: Any = load_trained(config, folder)
    if dtype is not None:
        model = model.to(dtype)
    autocast = compute_dtype(config)
    said: list[str | None] = []
    if uses_gpu(config):
        if autocast is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            autocast = None  # trained on a newer GPU: in fp32 nothing is lost
        model, note = place_on_gpus(model, autocast)
        said = [note, choose_copies(model, autocast, SHARE_FOR_COPIES_OF_ONE)]
    else:
        autocast = None  # a CPU computes in the weights' own format fastest
    chat_model = ChatModel(model, tokenizer, stop_ids=stop_ids(model, tokenizer), autocast_dtype=autocast)
    return chat_model, [f"{chat_model.device} in {chat_model.format}", *filter(None, said)]


def _require_template(tokenizer: PreTrainedTokenizerBase, target: Target) -> None:
    if tokenizer.chat_template:
        return
    raise RequestError(
        f"the tokenizer of {target.name} has no chat template, so a conversation cannot be written as this model reads "
        "it: it is a base model or was trained on plain text. Name the instruction-tuned version, or a run that was "
        "trained on conversations; if you know its template, save it as chat_template.jinja beside the tokenizer",
        problem_id="tokenizer-no-template",
    )
