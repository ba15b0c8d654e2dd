"""What is exported: the tokenizer, a whole model with its stored weights, or an adapter, alone or over its base.

Architecture and generation settings come from the checkpoint's folder if it has them, or else from the run's
configuration (FSDP saves no config.json).
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from tunebook.checkpoint.export.weights import Weights, require_package
from tunebook.config.choices import MasterWeights, PeftMethod
from tunebook.config.choices import Weights as Origin
from tunebook.config.schema import ModelConfig, PeftSettings, RunConfig
from tunebook.model.adapters import adapter_config, require_whole_adapter
from tunebook.model.load import (
    attention_option,
    auto_class,
    fit_embeddings,
    forget_unused_conversions,
    load_architecture,
    load_model,
    model_location,
)
from tunebook.model.tokenizer import added_token_ids, agree_on_tokens, load_tokenizer, trainer_tokenizer
from tunebook.model.tokenizer_files import VOCABULARY_FILES
from tunebook.model.weight_files import require_complete

if TYPE_CHECKING:
    from peft import PeftConfig

GENERATION_FILE = "generation_config.json"


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
    trust = config.model.trust_remote_code
    if config.peft.method is PeftMethod.full and (folder / "config.json").is_file():
        architecture = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust)
    else:
        architecture = copy.deepcopy(load_architecture(config.model))
    with no_init_weights():
        model: PreTrainedModel = auto_class(architecture).from_config(
            architecture,
            trust_remote_code=trust,
            attn_implementation=attention_option(config.attention.implementation),
        )
    model.tie_weights()
    model = fit_embeddings(config.model, model)
    generation: Any = GenerationConfig
    with suppress(OSError):  # generation settings are optional
        if (folder / GENERATION_FILE).is_file():
            model.generation_config = generation.from_pretrained(str(folder))
        elif config.model.weights is Origin.pretrained:
            place = model_location(config.model)
            model.generation_config = generation.from_pretrained(place, revision=config.model.revision)
    agree_on_tokens(model, tokenizer)
    return model


def whole_model(skeleton: PreTrainedModel, weights: Weights, place: str) -> PreTrainedModel:
    """The model with stored weights, in the format of most of them.

    Raises: RequestError for weights that are missing, unexpected or misshapen.
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
    # Shards have the names of modules. Saved like a new model's, they get the names of published files.
    if set(weights) <= set(skeleton.state_dict()):
        model._weight_conversions = None
    forget_unused_conversions(model)
    model.generation_config = skeleton.generation_config
    whole: PreTrainedModel = model.eval()
    return whole


def adapter_settings(config: RunConfig, folder: Path, weights: Weights, skeleton: PreTrainedModel | None) -> PeftConfig:
    """An adapter's settings with the names of the modules that they select.

    The shards of a strategy come without them: they are the run's, over the base `skeleton`, which gives up its memory.
    Raises: RequestError for shards whose tensors are missing, unexpected or misshapen.
    """
    from peft import PeftConfig

    if skeleton is None:
        settings: PeftConfig = PeftConfig.from_pretrained(str(folder))
    else:
        made = adapter_config(config, skeleton, added_token_ids(config.model, trainer_tokenizer(config)))
        assert made is not None
        base: Any = skeleton
        settings = _attached(base.to(device="meta"), made, weights, folder).peft_config["default"]
    settings.base_model_name_or_path = config.model.name or settings.base_model_name_or_path
    settings.inference_mode = True
    return settings


def adapted_base(config: RunConfig, settings: PeftConfig, weights: Weights, dtype: torch.dtype, folder: Path) -> Any:
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
    adapted = _attached(in_format(base, dtype), settings, weights, folder)
    set_peft_model_state_dict(adapted, weights)
    return adapted.eval()


def _attached(base: Any, settings: PeftConfig, weights: Weights, folder: Path) -> Any:
    """The base with an untrained adapter, which has the names and shapes of the stored one."""
    from peft import get_peft_model

    fresh = copy.deepcopy(settings)
    fresh.inference_mode = False
    adapted = get_peft_model(base, fresh)
    require_whole_adapter(adapted, {name: tuple(tensor.shape) for name, tensor in weights.items()}, folder)
    return adapted


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
