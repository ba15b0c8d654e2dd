"""An adapter: written alone in PEFT's layout, which needs no base, or merged into its base by PEFT."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tunebook.checkpoint.export.model import in_format, most_frequent
from tunebook.checkpoint.export.weights import ADAPTER_WEIGHTS, Weights, require_package
from tunebook.checkpoint.export.write import Written, differs, require_finite
from tunebook.config.choices import MasterWeights, PeftMethod
from tunebook.config.choices import Weights as Origin
from tunebook.config.schema import PeftSettings, RunConfig
from tunebook.errors import RequestError, first_line
from tunebook.model.adapters import ADAPTER_FILE, adapter_config, require_whole_adapter
from tunebook.model.load import load_model
from tunebook.model.tokenizer import added_token_ids, trainer_tokenizer
from tunebook.parallel.wrapped import format_name

if TYPE_CHECKING:
    from peft import PeftConfig


def adapter_settings(config: RunConfig, folder: Path, skeleton: PreTrainedModel, weights: Weights) -> PeftConfig:
    """An adapter's settings with the names of the modules that they select, compared with its weights.

    `skeleton` gives up the memory of its weights. Raises: RequestError for settings that cannot be read, and for
    tensors that are missing, unexpected or misshapen.
    """
    from peft import PeftConfig

    if (folder / ADAPTER_FILE).is_file():
        try:
            settings = PeftConfig.from_pretrained(str(folder))
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(
                f"{folder / ADAPTER_FILE} cannot be read ({first_line(error)}); name another checkpoint with "
                "--checkpoint",
                problem_id="weights-file-damaged",
            ) from error
    else:
        made = adapter_config(config, skeleton, added_token_ids(config.model, trainer_tokenizer(config)))
        assert made is not None
        settings = made
    on_meta = copy.deepcopy(skeleton.to(device=torch.device("meta")))  # type: ignore[call-arg]
    adapted = _attached(on_meta, settings)
    require_whole_adapter(adapted, {name: tuple(tensor.shape) for name, tensor in weights.items()}, folder)
    found: PeftConfig = adapted.peft_config["default"]
    found.base_model_name_or_path = config.model.name or found.base_model_name_or_path
    found.inference_mode = True
    return found


def _attached(base: Any, settings: PeftConfig) -> Any:
    from peft import get_peft_model

    fresh = copy.deepcopy(settings)
    fresh.inference_mode = False
    return get_peft_model(base, fresh)


def adapted_base(config: RunConfig, settings: PeftConfig, weights: Weights, dtype: torch.dtype) -> Any:
    """The base in a number format with the trained adapter, not merged. Raises: RequestError if it cannot be loaded.

    Random weights are drawn as the run drew them. The base of a QLoRA run is quantized to 4 bits and back, as training
    computed with it.
    """
    from peft import set_peft_model_state_dict

    if config.peft.method is PeftMethod.qlora:
        require_package("bitsandbytes", "--merge: the base was quantized by bitsandbytes")
        quantized: Any = load_model(config)
        base = quantized.dequantize()
        base._weight_conversions = None  # reading and quantizing cannot be reversed; it is saved like a new model
    else:
        precision = config.precision
        if config.model.weights is Origin.pretrained:  # read in the requested format, without another copy
            master = MasterWeights.bf16 if dtype is torch.bfloat16 else MasterWeights.fp32
            precision = replace(precision, master_weights=master)
        base = load_model(replace(config, precision=precision, peft=PeftSettings()))
    adapted = _attached(in_format(base, dtype), settings)
    set_peft_model_state_dict(adapted, weights)
    return adapted.eval()


def save_adapter(settings: PeftConfig, weights: Weights, dtype: torch.dtype | None, folder: Path) -> Written:
    """Write an adapter's files, read its weights again and compare them bit for bit. Raises: DifferenceError."""
    cast = {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in weights.items()}
    require_finite(cast, most_frequent(cast))
    save_file(cast, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    settings.save_pretrained(str(folder))
    written = load_file(folder / ADAPTER_WEIGHTS)
    if written.keys() != cast.keys() or not all(torch.equal(written[name], cast[name]) for name in cast):
        raise differs("its tensors are others")
    return Written(
        dtype=format_name(most_frequent(cast)),
        num_parameters=sum(tensor.numel() for tensor in cast.values()),
        is_exact=all(torch.equal(tensor.float(), weights[name].float()) for name, tensor in cast.items()),
    )
