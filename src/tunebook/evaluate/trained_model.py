"""Load a run's model as it was trained: weights or adapter, number format, tokenizer, stop tokens, device.

Evaluations and chats both load here, so that they get the same answers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.choices import Compute, Generation, Weights
from tunebook.config.schema import AttentionConfig, ModelConfig, PeftSettings, RunConfig
from tunebook.errors import DoesNotFitError
from tunebook.facts.attention import MASKED, WITHOUT_KERNEL
from tunebook.files import remembered_hash, sha256_text
from tunebook.model.adapters import is_adapter, with_adapter
from tunebook.model.load import load_architecture, load_model, weights_folder
from tunebook.model.tokenizer import has_padding_token, load_tokenizer
from tunebook.model.tokenizer_files import has_vocabulary
from tunebook.model.weight_files import weights_fingerprint
from tunebook.record.model_origin import Origin, check_base, check_bound

# Files that determine a model's answers, in addition to its weights and tokenizer.
_HASHED = ("config.json", "generation_config.json", "adapter_config.json", "adapter_model.*", "*processor_config.json")

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def load_trained(
    config: RunConfig, folder: Path | None, *, is_sharded: bool = False, device: torch.device | None = None
) -> PreTrainedModel:
    """Load `folder` on the CPU (quantized weights: on the GPU); without a folder, load training's initial weights.

    `is_sharded` loads onto all visible GPUs, some layers on each. `device` loads onto that device, except random
    weights.
    """
    model = load_model(_config_to_load(config, folder), is_sharded=is_sharded, device=device)
    if folder is not None and is_adapter(folder):
        return with_adapter(model, folder, config.peft.method)
    return model


def trained_architecture(config: RunConfig, folder: Path | None) -> PretrainedConfig:
    """Return the configuration of the model that `load_trained` would load."""
    return load_architecture(_config_to_load(config, folder).model)


def uses_gpu(config: RunConfig) -> bool:
    """Return whether a run's model answers on a GPU: if there is one, unless the run was made for a CPU."""
    import torch

    return torch.cuda.is_available() and config.hardware.generation is not Generation.cpu


def compute_dtype(config: RunConfig) -> torch.dtype | None:
    """Return the autocast format, as in training; None: the weights' own format, also on a GPU without bf16."""
    import torch

    if config.precision.compute is Compute.fp16:
        return torch.float16
    if config.precision.compute is Compute.fp32:
        return None
    is_older = uses_gpu(config) and not torch.cuda.is_bf16_supported(including_emulation=False)
    return None if is_older else torch.bfloat16


def tokenizer_of_run(model: ModelConfig, folder: Path | None) -> ModelConfig:
    """Return the model whose tokenizer is used: the one saved with the weights, or else the base's."""
    if folder is None or not has_vocabulary(folder):
        return model
    return ModelConfig(path=str(folder), trust_remote_code=model.trust_remote_code, template_date=model.template_date)


def bound_tokenizer(
    config: RunConfig, folder: Path | None, trained: Origin | None
) -> tuple[PreTrainedTokenizerBase, dict[str, Any]]:
    """Load a model's tokenizer and compare it with the training's; return it and the record of the comparison.

    If the model needs the weights that the run started from, they are compared too. Raises: DataError for a difference.
    """
    tokenizer = load_tokenizer(tokenizer_of_run(config.model, folder), is_padded=False)
    if not has_padding_token(tokenizer):
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked
    bound = check_bound(trained, tokenizer, config.dataset.system_prompt)
    if folder is None or is_adapter(folder):
        check_base(trained, config.model)
    return tokenizer, bound


def load_to_answer(
    config: RunConfig, folder: Path | None, *, is_sharded: bool = False
) -> tuple[Any, torch.dtype | None]:
    """Load a model on its device; return it and the autocast format.

    Raises: DoesNotFitError if the free memory of the GPUs is too small.
    """
    dtype = compute_dtype(config)
    if not uses_gpu(config):
        return load_trained(config, folder).train(False), dtype
    import torch

    if is_sharded:
        model: Any = load_trained(config, folder, is_sharded=True)
        devices = getattr(model, "hf_device_map", None) or {}
        if {"cpu", "disk"} & {str(device) for device in devices.values()}:  # each batch would copy those layers again
            raise DoesNotFitError(
                "the visible GPUs have too little free memory for the model; end what else runs there (nvidia-smi "
                "lists it), or use more or larger GPUs",
                problem_id="model-does-not-fit",
            )
    else:
        # Not through the host, whose memory may not hold one model per GPU. Quantized weights cannot be moved.
        device = torch.device("cuda", torch.cuda.current_device())
        model = load_trained(config, folder, device=device)
        if any(parameter.device != device for parameter in model.parameters()):
            model = model.to(device)
    if dtype is not None:
        keep_converted(model, dtype)
    return model.train(False), dtype


def keep_converted(model: Any, compute_dtype: torch.dtype) -> None:
    """Let autocast keep converted weights if they take less than half of the free memory; else each product converts.

    torch keeps only weights that require a gradient (`cached_cast` in aten/src/ATen/autocast_mode.cpp), even under
    no_grad, and the base of a merged adapter requires none. Without the copies generation is slow.
    """
    import torch

    converted = [parameter for parameter in model.parameters() if parameter.dtype is torch.float32]
    num_bytes = sum(parameter.numel() for parameter in converted) * compute_dtype.itemsize
    free_bytes = sum(torch.cuda.mem_get_info(gpu)[0] for gpu in {parameter.device for parameter in converted})
    for parameter in converted:
        parameter.requires_grad_(num_bytes <= free_bytes / 2)


def _config_to_load(config: RunConfig, folder: Path | None) -> RunConfig:
    """Return the run's configuration with `folder` as its model; an adapter is loaded on the run's own base."""
    if config.attention.implementation is not WITHOUT_KERNEL:
        # The kernels for packed rows support neither padding nor a cache.
        config = replace(config, attention=AttentionConfig(implementation=MASKED))
    if folder is None or is_adapter(folder):
        return config
    trained = replace(config.model, path=str(folder), name=None, revision=None, weights=Weights.pretrained, facts=None)
    return replace(config, model=trained, peft=PeftSettings())


def model_identity(config: RunConfig, folder: Path | None) -> dict[str, Any]:
    """Describe everything that determines a model's answers except its tokenizer: weights, formats, attention."""
    identity: dict[str, Any] = {
        "master_weights": config.precision.master_weights.name,
        "compute": config.precision.compute.name,
        "peft": config.peft.method.name,
        "is_eager": config.attention.implementation is WITHOUT_KERNEL,
    }
    if folder is not None:
        identity["model"] = _content_of(folder)
    if folder is None or is_adapter(folder):
        is_random = config.model.weights is Weights.random
        identity["base"] = _random_weights(config) if is_random else _content_of(weights_folder(config.model))
    return identity


def _random_weights(config: RunConfig) -> dict[str, Any]:
    import torch

    architecture = load_architecture(config.model).to_json_string(use_diff=False)
    return {"seed": config.training.seed, "architecture": sha256_text(architecture), "drawn_by": torch.__version__}


def _content_of(folder: Path) -> dict[str, Any]:
    files = sorted(file for pattern in _HASHED for file in folder.glob(pattern))
    hashes: dict[str, Any] = {file.name: remembered_hash(file) for file in files}
    return hashes | {"weights": weights_fingerprint(ModelConfig(path=str(folder)))}
