"""A run's model as it was trained: weights or adapter, number format, tokenizer, where generation ends.

What an evaluation scores and what a chat talks to is loaded here, so that both answer alike.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.config.choices import Attention, Compute, Generation, Weights
from tunebook.config.schema import AttentionConfig, ModelConfig, PeftSettings, RunConfig
from tunebook.model.adapters import is_adapter, with_adapter
from tunebook.model.tokenizer import has_padding_token, load_tokenizer, stop_token_ids
from tunebook.model.tokenizer_files import has_vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def load_trained(
    config: RunConfig, folder: Path | None, *, is_sharded: bool = False, device: torch.device | None = None
) -> PreTrainedModel:
    """The model in `folder` on the CPU (quantised weights: on the GPU); without one, what training starts from.

    `is_sharded` reads it straight onto all GPUs that this process sees, a few layers on each; `device` onto that one,
    but for weights that are drawn.
    """
    from tunebook.model.load import load_model

    model = load_model(_config_to_load(config, folder), is_sharded=is_sharded, device=device)
    if folder is not None and is_adapter(folder):
        return with_adapter(model, folder, config.peft.method)
    return model


def trained_architecture(config: RunConfig, folder: Path | None) -> PretrainedConfig:
    """The settings of the model that `load_trained` would load, without its weights."""
    from tunebook.model.load import load_architecture

    return load_architecture(_config_to_load(config, folder).model)


def uses_gpu(config: RunConfig) -> bool:
    """Whether a run's model answers on a GPU: wherever there is one, unless the run was made for a CPU."""
    import torch

    return torch.cuda.is_available() and config.hardware.generation is not Generation.cpu


def compute_dtype(config: RunConfig) -> torch.dtype | None:
    """What the products are computed in, as in training; None: in the weights' own format."""
    import torch

    return {Compute.bf16: torch.bfloat16, Compute.fp8: torch.bfloat16, Compute.fp16: torch.float16}.get(
        config.precision.compute
    )


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Where generation ends: at the tokens that end a trained turn, and at those that the model's settings name."""
    assert model.generation_config is not None
    named = model.generation_config.eos_token_id
    known = named if isinstance(named, list) else [] if named is None else [named]
    return sorted({*stop_token_ids(tokenizer), *known})


def tokenizer_of_run(model: ModelConfig, folder: Path | None) -> ModelConfig:
    """Where the tokenizer is: saved beside the weights, which holds wherever the run is copied, or else the base's."""
    if folder is None or not has_vocabulary(folder):
        return model
    return ModelConfig(path=str(folder), trust_remote_code=model.trust_remote_code, template_date=model.template_date)


def load_padded_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """A tokenizer that can fill up rows: with its end-of-text token where it has no other, since padding is masked."""
    tokenizer = load_tokenizer(model, is_padded=False)
    if not has_padding_token(tokenizer):
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _config_to_load(config: RunConfig, folder: Path | None) -> RunConfig:
    """The run's configuration with `folder` as its model; an adapter goes onto the run's own base."""
    if config.attention.implementation is not Attention.eager:
        # Generation pads its rows and keeps a cache, which the kernels for packed rows are not made for.
        config = replace(config, attention=AttentionConfig(implementation=Attention.sdpa))
    if folder is None or is_adapter(folder):
        return config
    trained = replace(config.model, path=str(folder), name=None, revision=None, weights=Weights.pretrained, facts=None)
    return replace(config, model=trained, peft=PeftSettings())
