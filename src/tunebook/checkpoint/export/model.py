"""What an export needs in addition to weights: architecture, generation settings and tokenizer; and the whole model.

They come from the checkpoint's folder if it has them, or else from the run's configuration (FSDP saves no config.json).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from tunebook.checkpoint.export.weights import Weights
from tunebook.config.choices import PeftMethod
from tunebook.config.choices import Weights as Origin
from tunebook.config.schema import ModelConfig, RunConfig
from tunebook.errors import RequestError
from tunebook.model.hub import hub_problem
from tunebook.model.load import (
    attention_option,
    fit_embeddings,
    forget_unused_conversions,
    load_architecture,
    model_location,
    planned_architecture,
)
from tunebook.model.tokenizer import agree_on_tokens, load_tokenizer, trainer_tokenizer
from tunebook.model.tokenizer_files import VOCABULARY_FILES
from tunebook.model.weight_files import require_complete


def find_tokenizer(config: RunConfig, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder of the weights, or else the one that the run names."""
    if any((folder / name).is_file() for name in VOCABULARY_FILES):
        stored = ModelConfig(path=str(folder), trust_remote_code=config.model.trust_remote_code)
        return load_tokenizer(stored, is_padded=False)
    return trainer_tokenizer(config)


def skeleton_of(config: RunConfig, folder: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model of a checkpoint, or an adapter's base, without weights, which take no memory until they are written.

    Raises: RequestError for a base model that cannot be reached.
    """
    loader: Any = AutoModelForCausalLM
    with no_init_weights():
        model: PreTrainedModel = loader.from_config(
            copy.deepcopy(_architecture(config, folder)),
            trust_remote_code=config.model.trust_remote_code,
            attn_implementation=attention_option(config.attention.implementation),
        )
    model.tie_weights()
    model = fit_embeddings(config.model, model)
    model.generation_config = _generation(config, folder) or model.generation_config
    agree_on_tokens(model, tokenizer)
    return model


def _architecture(config: RunConfig, folder: Path) -> PretrainedConfig:
    if config.peft.method is PeftMethod.full and (folder / "config.json").is_file():
        trust = config.model.trust_remote_code
        try:
            stored: PretrainedConfig = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust)
        except (OSError, ValueError) as error:
            raise hub_problem(error, "model", str(folder)) from error
        return stored
    try:
        return load_architecture(config.model)
    except RequestError:  # the base is gone or has changed; without weights the plan's sizes are enough
        if config.model.facts is None:
            raise
        return planned_architecture(config.model)


def _generation(config: RunConfig, folder: Path) -> Any:
    kind: Any = GenerationConfig
    try:
        if (folder / "generation_config.json").is_file():
            return kind.from_pretrained(str(folder))
        if config.model.weights is Origin.pretrained:
            return kind.from_pretrained(model_location(config.model), revision=config.model.revision)
    except OSError:  # generation settings are optional
        pass
    return None


def whole_model(skeleton: PreTrainedModel, weights: Weights, place: str) -> PreTrainedModel:
    """The model with stored weights, in the format of most of them.

    Raises: RequestError for weights that are missing, unexpected, misshapen, or differ where the model has one tensor.
    """
    loader: Any = type(skeleton)
    model, info = loader.from_pretrained(
        None,
        config=skeleton.config,
        state_dict=weights,
        dtype=most_frequent(weights),
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    kinds = {kind: sorted(map(str, info[f"{kind}_keys"])) for kind in ("missing", "unexpected", "mismatched")}
    require_complete(**kinds, place=place)
    if model.all_tied_weights_keys != skeleton.all_tied_weights_keys:
        raise RequestError(
            f"the weights in {place} cannot be exported: the embeddings and the head are one tensor in this "
            "architecture (tie_word_embeddings) and differ here; name another checkpoint with --checkpoint",
            problem_id="export-weights",
        )
    # Shards have the names of modules. Saved like a new model's, they get the names of published files.
    if set(weights) <= set(skeleton.state_dict()):
        model._weight_conversions = None
    forget_unused_conversions(model)
    model.generation_config = skeleton.generation_config
    whole: PreTrainedModel = model.eval()
    return whole


def most_frequent(weights: Weights) -> torch.dtype:
    """The number format of most tensors."""
    dtypes = [tensor.dtype for tensor in weights.values() if tensor.is_floating_point()]
    return max(dict.fromkeys(dtypes), key=dtypes.count)


def in_format(model: Any, dtype: torch.dtype) -> Any:
    """The same model with its floating-point parameters in a number format, one after the other; buffers are left."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model
