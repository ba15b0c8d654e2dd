"""What an export needs in addition to weights: architecture, generation settings, tokenizer, adapter, base model.

They come from the checkpoint's folder if it has them, or else from the run's configuration (FSDP saves no config.json).
A base model is in memory once, in the number format that is written.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

from tunebook.checkpoint.export.stored_weights import Weights, close
from tunebook.checkpoint.export.write import compare_with, refuse
from tunebook.config.choices import Attention, MasterWeights, PeftMethod
from tunebook.config.choices import Weights as Origin
from tunebook.config.schema import AttentionConfig, ModelConfig, PeftSettings, RunConfig
from tunebook.errors import RequestError, first_line
from tunebook.facts.attention import MASKED, WITHOUT_KERNEL
from tunebook.model.adapters import ADAPTER_FILE, adapter_config, adapter_shapes
from tunebook.model.hub import hub_problem
from tunebook.model.load import (
    attention_option,
    check_model,
    fit_embeddings,
    load_architecture,
    load_model,
    model_location,
    planned_architecture,
)
from tunebook.model.tokenizer import (
    added_token_ids,
    agree_on_tokens,
    load_tokenizer,
    rehearse_saving,
    trainer_tokenizer,
)
from tunebook.model.tokenizer_files import VOCABULARY_FILES

if TYPE_CHECKING:
    from peft import PeftConfig

_ADAPTER_NAME = "default"  # PEFT's name for the one adapter of a model
_OF_THE_BASE = (".base_layer.", ".original_module.")


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A model without weights, and the files that are written with them."""

    model: PreTrainedModel  # its weights take no memory until something is written to them
    tokenizer: PreTrainedTokenizerBase
    adapter: PeftConfig | None  # None: the model was trained whole


def blueprint_of(config: RunConfig, folder: Path, *, has_base: bool = True) -> Blueprint:
    """The architecture, tokenizer and adapter for a checkpoint's weights; without a base, from the plan's facts.

    Raises: RequestError for a base model that cannot be reached.
    """
    tokenizer = _tokenizer(config, folder)
    has_config = (folder / "config.json").is_file() and config.peft.method is PeftMethod.full
    if has_config:
        architecture = _read_architecture(folder, config)
    else:
        architecture = load_architecture(config.model) if has_base else _planned_architecture(config)
    model = fit_embeddings(config.model, without_weights(architecture, config))
    peft = _adapter(config, folder, model)
    generation = _generation(str(folder), None) if has_config else None
    if generation is None:
        if config.model.weights is Origin.pretrained:
            generation = _generation(model_location(config.model), config.model.revision)
        model.generation_config = generation or model.generation_config
        agree_on_tokens(model, tokenizer)
    else:
        model.generation_config = generation
    rehearse_saving(model, tokenizer)
    return Blueprint(model=model, tokenizer=tokenizer, adapter=peft)


def without_weights(architecture: PretrainedConfig, config: RunConfig) -> PreTrainedModel:
    """A model whose weights are not initialized; its buffers are computed, since they are not stored."""
    loader: Any = AutoModelForCausalLM
    with no_init_weights():
        model: PreTrainedModel = loader.from_config(
            copy.deepcopy(architecture),
            trust_remote_code=config.model.trust_remote_code,
            attn_implementation=attention_option(cpu_attention(config)),
        )
    model.tie_weights()
    return answering(model)


def load_folder(folder: Path, config: RunConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a checkpoint's folder, loaded by transformers in a number format."""
    loader: Any = AutoModelForCausalLM
    model: PreTrainedModel = loader.from_pretrained(
        str(folder),
        dtype=dtype,
        trust_remote_code=config.model.trust_remote_code,
        attn_implementation=attention_option(cpu_attention(config)),
    )
    return answering(model)


def load_base(config: RunConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The base model of an adapter in a number format, on the CPU. Raises: RequestError if it cannot be loaded.

    Random weights are drawn as the run drew them. The base of a QLoRA run is loaded as published.
    """
    precision = config.precision
    if config.model.weights is Origin.pretrained:  # read in the requested format, without another copy
        master = MasterWeights.bf16 if dtype is torch.bfloat16 else MasterWeights.fp32
        precision = replace(precision, master_weights=master)
    base = load_model(replace(_on_cpu(config), precision=precision, peft=PeftSettings()))
    return answering(in_format(base, dtype))


def load_dequantized_base(config: RunConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The base of a QLoRA run as training computed with it: quantized to 4 bits and back. Raises: RequestError."""
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise RequestError(
            "--merge: this adapter was trained over a base quantized by bitsandbytes, which is not installed here, so "
            "the base cannot be rounded as it was in training; install it (pip install 'bitsandbytes>=0.50.2,<0.51'; "
            "a CPU is enough), or leave --merge out",
            problem_id="export-merge",
        ) from error
    quantized: Any = load_model(_on_cpu(config))
    plain = quantized.dequantize()
    plain._weight_conversions = None  # reading and quantizing cannot be reversed; it is saved like a new model
    return answering(in_format(plain, dtype))


def answering(model: Any) -> PreTrainedModel:
    """The same model in evaluation mode."""
    evaluated: PreTrainedModel = model.eval()
    return evaluated


def in_format(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same model with its floating-point parameters in a number format, one after the other; buffers are left."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def filled(model: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    """The model with stored weights in their stored format; mapped files are not copied."""
    for name, stored in weights.items():
        tensor = stored.load()
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in module._parameters:
            module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor
    close(weights)
    model.tie_weights()
    return model


def _on_cpu(config: RunConfig) -> RunConfig:
    return replace(config, attention=AttentionConfig(implementation=cpu_attention(config)))


def cpu_attention(config: RunConfig) -> Attention:
    """An attention implementation that runs on a CPU."""
    return WITHOUT_KERNEL if config.attention.implementation is WITHOUT_KERNEL else MASKED


def _tokenizer(config: RunConfig, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder of the weights, or else the one that the run names."""
    if any((folder / name).is_file() for name in VOCABULARY_FILES):
        beside = ModelConfig(path=str(folder), trust_remote_code=config.model.trust_remote_code)
        return load_tokenizer(beside, is_padded=False)
    return trainer_tokenizer(config)


def _adapter(config: RunConfig, folder: Path, base: PreTrainedModel) -> PeftConfig | None:
    if (folder / ADAPTER_FILE).is_file():
        from peft import PeftConfig

        try:
            found: PeftConfig = PeftConfig.from_pretrained(str(folder))
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(
                f"{folder / ADAPTER_FILE} cannot be read ({first_line(error)}); name another checkpoint with "
                "--checkpoint",
                problem_id="weights-file-damaged",
            ) from error
        return found
    return adapter_config(config, base, added_token_ids(config.model, trainer_tokenizer(config)))


def _read_architecture(folder: Path, config: RunConfig) -> PretrainedConfig:

    try:
        architecture: PretrainedConfig = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise hub_problem(error, "model", str(folder)) from error
    return architecture


def _planned_architecture(config: RunConfig) -> PretrainedConfig:
    """The architecture of a base model that is gone or has changed. Raises: RequestError if it is unknown."""
    if config.model.facts is not None:
        return planned_architecture(config.model)
    folder = Path(model_location(config.model))
    if not (folder / "config.json").is_file():
        check_model(config.model)
    return _read_architecture(folder, config)


def _generation(location: str, revision: str | None) -> Any:

    kind: Any = GenerationConfig
    try:
        return kind.from_pretrained(location, revision=revision)
    except OSError:  # generation settings are optional
        return None


def adapter_weights(weights: Weights) -> Weights:
    """An adapter's tensors by their names in its file: the names in shards contain the adapter's name."""
    return {_plain(name): tensor for name, tensor in weights.items() if not _is_of_the_base(name)}


def _is_of_the_base(name: str) -> bool:
    """Whether a tensor is of the base. Of two adapters on one module of stacked experts, one is the other's base."""
    return any(part in name for part in _OF_THE_BASE) and ".lora_" not in name


def _plain(name: str) -> str:
    """`...lora_A.default.weight` -> `...lora_A.weight`; `...modules_to_save.default.weight` -> `...weight`."""
    return name.replace(f".modules_to_save.{_ADAPTER_NAME}.", ".").replace(f".{_ADAPTER_NAME}.", ".")


def require_whole_adapter(blueprint: Blueprint, weights: Weights, place: str) -> PeftConfig:
    """Compare an adapter with its base; returns its settings with the names of the modules that they select.

    Raises: RequestError naming tensors that are empty, missing, misshapen or of another adapter.
    """
    assert blueprint.adapter is not None
    on_meta = blueprint.model.to(device=torch.device("meta"))  # type: ignore[call-arg]  # as upstream's own wrapper
    adapted = _attached(copy.deepcopy(on_meta), blueprint.adapter)
    refuse(compare_with(adapter_shapes(adapted), weights), place)
    settings: PeftConfig = adapted.peft_config[_ADAPTER_NAME]
    settings.inference_mode = True
    return settings


def with_trained(base: PreTrainedModel, settings: PeftConfig, weights: Weights) -> Any:
    """The base with an adapter of the checkpoint's tensors, not merged."""
    from peft import set_peft_model_state_dict

    adapted = _attached(base, settings)
    found: Any = set_peft_model_state_dict(adapted, {name: tensor.load() for name, tensor in weights.items()})
    assert not found.unexpected_keys, found.unexpected_keys  # they were compared
    return adapted.eval()


def _attached(base: PreTrainedModel, settings: PeftConfig) -> Any:
    from peft import get_peft_model

    fresh = copy.deepcopy(settings)
    fresh.inference_mode = False
    return get_peft_model(base, fresh)
