"""The weights of a checkpoint as whole tensors, read by the library whose format they have.

Forms, in the order of the search: safetensors of an adapter or a whole model, FSDP's sharded checkpoint
(`torch.distributed.checkpoint`), ZeRO's partitions (`deepspeed.utils.zero_to_fp32`). Pickled weights (`.bin`) are never
read: every checkpoint of Tunebook has one of the other forms. Nothing that is read runs code, and no process group is
needed. One copy of the weights is in memory; tensors of safetensors files are mapped.
"""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr, redirect_stdout
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from tunebook.checkpoint.unpickling import restricted_unpickling
from tunebook.errors import RequestError
from tunebook.model.adapters import ADAPTER_FILE
from tunebook.model.weight_files import find_weight_files, read_shapes

Weights = dict[str, torch.Tensor]

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_FSDP_FOLDER = "pytorch_model_fsdp_0"  # accelerate's name
_FSDP_KEY = "model"  # accelerate 1.15 saves {"model": state_dict} (`save_fsdp_model`)
_ADAPTER_NAME = "default"  # PEFT's name for the one adapter of a model, which is in the names of its shards
_OF_THE_BASE = (".base_layer.", ".original_module.")


class Form(Enum):
    """How weights are stored, as named in messages and model cards."""

    adapter = "an adapter's safetensors"
    whole = "whole safetensors"
    fsdp = "FSDP's sharded checkpoint"
    zero = "ZeRO's partitions"


def form_of(folder: Path) -> Form:
    """How the weights in a complete checkpoint, or a trained model's folder, are stored."""
    adapter = folder / ADAPTER_WEIGHTS
    # Where DeepSpeed does not gather, transformers leaves an adapter file without a tensor, and the partitions.
    if (folder / ADAPTER_FILE).is_file() and adapter.is_file() and read_shapes([adapter]):
        return Form.adapter
    if any(file.suffix == ".safetensors" for file in find_weight_files(folder)):
        return Form.whole
    if (folder / _FSDP_FOLDER / ".metadata").is_file():
        return Form.fsdp
    return Form.zero


def read_weights(folder: Path, form: Form, *, is_adapter: bool) -> Weights:
    """The weights in a folder: of a whole model by the names of its modules or files, of an adapter by PEFT's names.

    Raises: DataError for a file that would run code.
    """
    if form is Form.fsdp:
        weights = _fsdp_weights(folder / _FSDP_FOLDER)
    elif form is Form.zero:
        weights = _zero_weights(folder, is_adapter=is_adapter)
    else:
        files = [folder / ADAPTER_WEIGHTS] if form is Form.adapter else find_weight_files(folder)
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return _adapter_names(weights) if is_adapter else weights


def _fsdp_weights(folder: Path) -> Weights:
    with restricted_unpickling(), warnings.catch_warnings():  # reading without a process group is intended
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
        weights: Weights = _load_state_dict_from_keys({_FSDP_KEY}, storage_reader=FileSystemReader(folder))[_FSDP_KEY]
    return weights


def _zero_weights(checkpoint: Path, *, is_adapter: bool) -> Weights:
    """The parameters of a ZeRO checkpoint in their master precision.

    Under stage 3 they are put together one by one. Of stages 1 and 2, DeepSpeed joins all of them at once. Raises: any
    error of DeepSpeed, RequestError if it is not installed.
    """
    require_package("deepspeed", f"{checkpoint} was written by DeepSpeed, which reads it")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with restricted_unpickling(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        lazy: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(
            str(checkpoint), exclude_frozen_parameters=is_adapter, lazy_mode=True
        )
    return {name: tensor.contiguous() for name, tensor in lazy.items()}


def require_package(name: str, reason: str) -> None:
    """Raises: RequestError if a package is not installed."""
    if find_spec(name) is None:
        raise RequestError(
            f"{reason}, and {name} is not installed; type: pip install {name}", problem_id="export-package"
        )


def _adapter_names(weights: Weights) -> Weights:
    """An adapter's tensors by their names in its file.

    `...lora_A.default.weight` -> `...lora_A.weight`; `...modules_to_save.default.weight` -> `...weight`. Tensors of the
    base are left out. Of two adapters on one module of stacked experts, one is the other's base, and stays.
    """
    return {
        name.replace(f".modules_to_save.{_ADAPTER_NAME}.", ".").replace(f".{_ADAPTER_NAME}.", "."): tensor
        for name, tensor in weights.items()
        if ".lora_" in name or not any(part in name for part in _OF_THE_BASE)
    }
