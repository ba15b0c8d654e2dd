"""Load a run's model as it was trained: weights or adapter, number format, tokenizer, stop tokens, device.

Evaluations and chats both load here, so that they get the same answers.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.choices import Compute, Generation, Weights
from tunebook.config.schema import AttentionConfig, ModelConfig, PeftSettings, RunConfig
from tunebook.errors import DoesNotFitError
from tunebook.facts.attention import MASKED, WITHOUT_KERNEL
from tunebook.hardware.detect import GIB
from tunebook.model.adapters import is_adapter, with_adapter
from tunebook.model.tokenizer import has_padding_token, load_tokenizer
from tunebook.model.tokenizer_files import has_vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SHARE_FOR_COPIES = 0.5  # of the free memory after loading the weights; the rest is for a batch of requests


def load_trained(
    config: RunConfig, folder: Path | None, *, is_sharded: bool = False, device: torch.device | None = None
) -> PreTrainedModel:
    """Load `folder` on the CPU (quantized weights: on the GPU); without a folder, load training's initial weights.

    `is_sharded` loads onto all visible GPUs, some layers on each. `device` loads onto that device, except random
    weights.
    """
    from tunebook.model.load import load_model

    model = load_model(_config_to_load(config, folder), is_sharded=is_sharded, device=device)
    if folder is not None and is_adapter(folder):
        return with_adapter(model, folder, config.peft.method)
    return model


def trained_architecture(config: RunConfig, folder: Path | None) -> PretrainedConfig:
    """Return the configuration of the model that `load_trained` would load."""
    from tunebook.model.load import load_architecture

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


def load_padded_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load a tokenizer that can pad. Its end-of-text token replaces a missing padding token: padding is masked."""
    tokenizer = load_tokenizer(model, is_padded=False)
    if not has_padding_token(tokenizer):
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_to_answer(
    config: RunConfig, folder: Path | None, *, is_sharded: bool = False
) -> tuple[Any, torch.dtype | None, str | None]:
    """Load a model on its device; return it, the autocast format, and a note for the user, if any.

    Raises: DoesNotFitError if the free memory of the GPUs is too small.
    """
    dtype = compute_dtype(config)
    if not uses_gpu(config):
        return load_trained(config, folder).train(False), dtype, None
    # Not through the host, whose memory may not hold one model per GPU.
    model = load_trained(config, folder, is_sharded=True) if is_sharded else _load_on_gpu(config, folder)
    refuse_offloading(model)
    return model.train(False), dtype, choose_copies(model, dtype)


def _load_on_gpu(config: RunConfig, folder: Path | None) -> Any:
    import torch

    from tunebook.model.gpu_memory import is_out_of_memory

    device = torch.device("cuda", torch.cuda.current_device())
    try:
        model: Any = load_trained(config, folder, device=device)
        # Quantized weights are there already, and cannot be moved.
        return model if all(parameter.device == device for parameter in model.parameters()) else model.to(device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        free, whole = torch.cuda.mem_get_info(device)
        raise DoesNotFitError(
            f"the model's weights do not fit into a GPU of {whole / GIB:.1f} GiB with {free / GIB:.1f} GiB free; end "
            "what else runs there (nvidia-smi lists it), or leave that GPU out by CUDA_VISIBLE_DEVICES",
            problem_id="model-does-not-fit",
        ) from error


def refuse_offloading(model: Any) -> None:
    """Refuse a model with layers on the host, which every batch would copy again. Raises: DoesNotFitError."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if places & {"cpu", "disk"}:
        raise DoesNotFitError(
            "the visible GPUs have too little free memory for the model: parts of it would stay on the host; end what "
            "else runs there (nvidia-smi lists it), or use more GPUs",
            problem_id="model-does-not-fit",
        )


def choose_copies(model: Any, compute_dtype: torch.dtype | None) -> str | None:
    """Let autocast cache converted weights if they fit; return a note for the user if they do not.

    torch caches only weights that require a gradient (`cached_cast` in aten/src/ATen/autocast_mode.cpp), even under
    no_grad. The cache takes half as much memory as the fp32 weights. Without it each product converts its weights
    again, so that generation is slow. The base of a merged adapter requires no gradient, so this function sets it for
    all.
    """
    if compute_dtype is None:
        return None
    import torch

    sizes: defaultdict[torch.device, int] = defaultdict(int)
    converted = [parameter for parameter in model.parameters() if parameter.dtype is torch.float32]
    for parameter in converted:
        sizes[parameter.device] += parameter.numel() * compute_dtype.itemsize
    is_kept = all(size <= SHARE_FOR_COPIES * _free_bytes(device) for device, size in sizes.items())
    for parameter in converted:
        parameter.requires_grad_(is_kept)
    if is_kept:
        return None
    name = str(compute_dtype).removeprefix("torch.")
    return (
        f"{sum(sizes.values()) / GIB:.1f} GiB for a copy of its weights in {name} are not free, so each product "
        "converts its own: slower, with the same results"
    )


def _free_bytes(device: torch.device) -> float:
    import torch

    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else float("inf")


def _config_to_load(config: RunConfig, folder: Path | None) -> RunConfig:
    """Return the run's configuration with `folder` as its model; an adapter is loaded on the run's own base."""
    if config.attention.implementation is not WITHOUT_KERNEL:
        # The kernels for packed rows support neither padding nor a cache.
        config = replace(config, attention=AttentionConfig(implementation=MASKED))
    if folder is None or is_adapter(folder):
        return config
    trained = replace(config.model, path=str(folder), name=None, revision=None, weights=Weights.pretrained, facts=None)
    return replace(config, model=trained, peft=PeftSettings())
