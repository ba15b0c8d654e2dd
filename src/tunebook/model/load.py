"""Loads the model of a run, pretrained or with random weights, and compares it with the planned sizes.

How the ranks get the weights depends on the strategy (`facts.sharing`). A host holds one copy, not one per GPU:

- `scatter`, ZeRO-3: each rank builds its own shards (`deepspeed.zero.Init`). Rank 0 fills them layer by layer.
- `send`, FSDP2: rank 0 loads the model. The others allocate it without writing to it, which takes no memory, until
  accelerate shards all of them and broadcasts rank 0's values. transformers' own loading reads all weights on every
  rank here (5.23: `_load_pretrained_model` never asks which rank it is on). The allocation is necessary: accelerate
  finds an optimizer's parameter by its address (`Accelerator._prepare_fsdp2`, 1.15), and on the meta device all
  addresses are the same.
- `each`, the others: every rank reads all weights, on GPUs from the file straight into the GPU's memory. Rank 0 draws
  random weights and broadcasts them.

The weights are loaded in the master precision (`precision.master_weights`); bf16 compute then comes from autocast, so
that small updates are not lost. Random weights are always drawn on the CPU in float32: the same on every machine.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tunebook.config.book import CHATML_TEMPLATE, resolve_path
from tunebook.config.choices import Attention, MasterWeights, PeftMethod, Weights
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import ModelConfig, ParallelismConfig, RunConfig
from tunebook.errors import RequestError
from tunebook.facts.attention import attention_facts
from tunebook.facts.sharing import Sharing, sharing_of, stays_whole
from tunebook.facts.strategies import ALONE
from tunebook.model.adapters import four_bit
from tunebook.model.base_config import model_folder_problem
from tunebook.model.hub import fetch_config, fetch_weights, hub_problem
from tunebook.model.positions import stretch_positions
from tunebook.model.tokenizer import load_tokenizer
from tunebook.model.weight_files import (
    check_stored_weights,
    find_weight_files,
    read_shapes,
    require_complete,
)

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

_VOCABULARY_MULTIPLE = 64  # tokens; matrix products of other sizes are slower
_ABSENT = "absent"  # of a key that an architecture's config does not have
_TEXT = "text_config"  # of a model with other parts, such as an image tower
# Our names of planned sizes -> their names in transformers' config of an architecture.
_CONFIG_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_word_embeddings",
}


def model_location(model: ModelConfig) -> str:
    """The name on the hub, or the absolute folder."""
    if model.path is not None:
        return str(resolve_path(model.path))
    assert model.name is not None
    return model.name


def check_model(model: ModelConfig) -> None:
    """Raises: RequestError for a model that cannot be loaded, with what is missing and what to type.

    Of a hub model only the config.json is fetched, which shows that the name exists and may be read.
    """
    if model.path is None:
        if model.weights is Weights.pretrained:
            fetch_config(model)
        return
    if problem := model_folder_problem(model):
        raise RequestError(f"model.path={model.path}: {problem}", problem_id="model-folder")
    if model.weights is not Weights.pretrained:
        return
    folder = resolve_path(model.path)
    files = find_weight_files(folder)
    if not files:
        raise RequestError(
            f"model.path={model.path}: {folder} has no weights (model.safetensors or pytorch_model.bin, or an index of "
            "several); add them, or train from scratch with model.weights=random",
            problem_id="model-without-weights",
        )
    # Raises for damaged or truncated files; pickled ones would need torch.
    read_shapes(file for file in files if file.suffix == ".safetensors")


def load_architecture(model: ModelConfig) -> PretrainedConfig:
    """The architecture's config, its positions stretched as asked.

    Raises: RequestError if it differs from the planned facts, or its positions cannot be stretched.
    """
    from transformers import AutoConfig

    if model.path is not None:
        check_model(model)
        folder = resolve_path(model.path)
    else:
        try:
            folder = fetch_config(model)
        except RequestError:
            # Without weights the planned facts are enough, and no hub is needed.
            if model.weights is Weights.random and model.facts is not None:
                return planned_architecture(model)
            raise
    try:
        architecture: PretrainedConfig = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise hub_problem(error, "model", model_location(model)) from error
    if model.facts is not None:
        _compare(architecture, model.facts)
    stretch_positions(architecture, model)
    return architecture


def planned_architecture(model: ModelConfig) -> PretrainedConfig:
    """The architecture of a model's facts, its positions stretched as asked. Raises: RequestError if it is unknown."""
    assert model.facts is not None
    architecture = architecture_from_facts(model.facts)
    stretch_positions(architecture, model)
    return architecture


def architecture_from_facts(facts: ModelFacts) -> PretrainedConfig:
    """An architecture with the planned sizes, for random weights where no hub can be reached."""
    from transformers import AutoConfig

    types = {name: kind for kind, name in known_classes()}
    if facts.architecture not in types:
        raise RequestError(
            f"model.facts.architecture={facts.architecture} is not known to the installed transformers",
            problem_id="unknown-architecture",
        )
    sizes = {
        "num_hidden_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_attention_heads": facts.num_attention_heads,
        "num_key_value_heads": facts.num_key_value_heads,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_position_embeddings,
        "tie_word_embeddings": facts.tie_word_embeddings,
    }
    further = copy.deepcopy(facts.config)
    if _TEXT in further:
        further[_TEXT] = sizes | further[_TEXT]
        sizes = {"tie_word_embeddings": facts.tie_word_embeddings}
    architecture: PretrainedConfig = AutoConfig.for_model(
        types[facts.architecture], architectures=[facts.architecture], **sizes | further
    )
    return architecture


def _compare(architecture: PretrainedConfig, facts: ModelFacts) -> None:
    text = architecture.get_text_config(decoder=True)
    stated = {
        name: largest(getattr(architecture, key, getattr(text, key, _ABSENT))) for name, key in _CONFIG_KEYS.items()
    }
    differing = [
        f"{name}={getattr(facts, name)} (config.json: {value})"
        for name, value in stated.items()
        if value not in (_ABSENT, getattr(facts, name))
    ]
    if differing:
        raise RequestError(
            f"the model is not the one that was planned with: model.facts {', '.join(differing)}; correct the model's "
            "file in hydra_configs/model, or set model.facts=null to read them from the model",
            problem_id="model-facts",
        )


def load_model(config: RunConfig, *, is_sharded: bool = False, device: torch.device | None = None) -> PreTrainedModel:
    """The whole initial model on the CPU, for a single process. Raises: as `begin_loading`.

    With `is_sharded`, pretrained layers are spread over all visible GPUs instead, to compute with but not to train.
    With `device`, pretrained weights are read directly into that GPU without using host memory.
    """
    alone = replace(config, parallelism=ParallelismConfig(strategy=ALONE))
    begun = begin_loading(alone)
    if is_sharded and config.model.weights is Weights.pretrained:
        return fit_embeddings(config.model, _read(alone, begun.config, "auto"))
    return finish_loading(alone, begun, device=device)


def begin_loading(config: RunConfig, rank: int = 0) -> PreTrainedModel:
    """A rank's model before the Trainer's arguments set a strategy: with random weights, or allocated only.

    Under ZeRO-3's zero.Init the same seed would give other weights, and the whole model could not be compared with the
    stored names and shapes. Every rank compares here, so that all of them fail in the same way.
    Raises: RequestError for a folder without weights, for missing, unexpected or misshapen weights, for damaged files
    and for an unreachable hub.
    """
    import torch

    from tunebook.model.random_weights import draw_weights

    architecture = load_architecture(config.model)
    if config.model.weights is Weights.pretrained:
        model = _without_weights(config, architecture)
        check_stored_weights(model, weights_folder(config.model))
        return model
    if rank != 0 and (sharing_of(config) is not Sharing.each or stays_whole(config)):
        return _without_weights(config, architecture)
    drawn = _without_weights(config, architecture, torch.float32)
    draw_weights(drawn, config.training.seed)
    # `to` would also round the rotary frequencies, which the other ranks, and whoever loads the model, compute.
    buffers = dict(_without_weights(config, architecture).named_buffers())
    for parameter in drawn.parameters():
        parameter.data = parameter.data.to(master_dtype(config))
    for name, buffer in drawn.named_buffers():
        buffer.data = buffer.data.to(buffers[name].dtype)
    return drawn


def finish_loading(
    config: RunConfig, begun: PreTrainedModel, rank: int = 0, device: torch.device | None = None
) -> PreTrainedModel:
    """A rank's model for the trainer, after the arguments have set the strategy and the ranks are connected.

    `begun` is this rank's result of `begin_loading`; `device` is where it trains, or None for a single process. What
    the other ranks get is in the module's docstring. Afterwards all ranks draw the same random numbers.
    """
    import torch

    sharing, model = sharing_of(config), begun
    if config.model.weights is Weights.random:
        if sharing is Sharing.scatter and device is not None:
            model = _scatter_drawn(config, begun, rank)
        elif stays_whole(config) and device is not None and torch.distributed.is_initialized():
            begun.to(device)  # type: ignore[arg-type]
            for parameter in begun.parameters():  # tied ones once
                torch.distributed.broadcast(parameter.data, src=0)
    elif rank == 0 or sharing is not Sharing.send:
        model = _read(config, begun.config, device)
    model = fit_embeddings(config.model, model)
    torch.manual_seed(config.training.seed)
    return model


def fit_embeddings(settings: ModelConfig, model: PreTrainedModel) -> PreTrainedModel:
    """The model with embeddings for the tokens that `model.chat_template=chatml` adds.

    They start as the mean of the others, as in TRL's `clone_chat_template`, but without noise, which would depend on
    where the weights are. The token that ends a turn starts as the one that ends a text: the model knows when to end.
    """
    if settings.chat_template != CHATML_TEMPLATE:
        return model
    tokenizer, text = load_tokenizer(settings, is_padded=False), model.config.get_text_config()
    before = text.vocab_size
    if len(tokenizer) > before:
        known = text.eos_token_id[0] if isinstance(text.eos_token_id, list) else text.eos_token_id
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=_VOCABULARY_MULTIPLE, mean_resizing=False)
        resized: Any = model
        for matrix in (resized.get_input_embeddings(), resized.get_output_embeddings()):
            _fill_new_rows(matrix.weight, before, ends=(tokenizer.eos_token_id, known))
    return model


def _fill_new_rows(weight: torch.nn.Parameter, num_rows: int, *, ends: tuple[int, int | None]) -> None:
    """Set the rows from `num_rows` on to the mean of those before, also of a weight that ZeRO-3 has divided.

    `ends`: a new row, and the row that it is copied from, if there is one.
    """
    import torch

    if hasattr(weight, "ds_id"):
        from deepspeed.zero import GatheredParameters

        whole: Any = GatheredParameters([weight], modifier_rank=0)
    else:
        whole = nullcontext()
    new, known = ends
    with whole, torch.no_grad():
        weight[num_rows:] = weight[:num_rows].float().mean(dim=0).to(weight.dtype)
        if known is not None and new >= num_rows:
            weight[new] = weight[known]


def master_dtype(config: RunConfig) -> torch.dtype:
    """The number format of the loaded weights and of trained weights."""
    import torch

    return torch.bfloat16 if config.precision.master_weights is MasterWeights.bf16 else torch.float32


def weights_folder(model: ModelConfig) -> Path:
    """The folder with the weights of a pretrained model; a hub model is downloaded unless it is cached."""
    return resolve_path(model.path) if model.path is not None else fetch_weights(model)


def attention_option(kernel: Attention) -> dict[str, str]:
    """transformers' option for the attention of the part that computes text.

    Towers for images and sound keep their own default: not all of them support every kernel.
    """
    return {"": kernel.value, _TEXT: kernel.value}


def largest(stated: Any) -> Any:
    """The largest size if an architecture has a list with one for each layer."""
    return max(stated) if isinstance(stated, list) else stated


def auto_class(architecture: PretrainedConfig) -> Any:
    """transformers' loader for an architecture: that of text, or of images and text where there is no other."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto as names

    kind = architecture.model_type
    is_text = kind in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or hasattr(architecture, "auto_map")
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def is_image_class(name: str) -> bool:
    """Whether a class of transformers is one of images and text; Gemma 3's is also loaded as one of text."""
    from transformers.models.auto import modeling_auto as names

    return name in names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()


def known_classes() -> list[tuple[str, str]]:
    """The types of models that `auto_class` may load, each with the name of a class."""
    from transformers.models.auto import modeling_auto as names

    tables = (names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return [
        (kind, name)
        for table in tables
        for kind, classes in table.items()
        for name in ([classes] if isinstance(classes, str) else classes)
    ]


def _options(config: RunConfig) -> dict[str, Any]:
    if attention_facts(config).needs_lengths:
        from tunebook.model.varlen_attention import register

        register(config.attention.implementation)
    return {
        "attn_implementation": attention_option(config.attention.implementation),
        "trust_remote_code": config.model.trust_remote_code,
    }


def _without_weights(
    config: RunConfig, architecture: PretrainedConfig, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model with allocated but unwritten weights, which take no memory. `dtype`: the master precision if None.

    Buffers are computed, since they are neither stored nor sent.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model: PreTrainedModel = auto_class(architecture).from_config(
            copy.deepcopy(architecture), dtype=dtype or master_dtype(config), **_options(config)
        )
    model.tie_weights()
    return model


def _scatter_drawn(config: RunConfig, begun: PreTrainedModel, rank: int) -> PreTrainedModel:
    """Rank 0's random weights, scattered to the shards of all ranks in the same way as stored weights."""
    import torch

    drawn = dict(begun.state_dict())  # dict: without torch's metadata, which transformers drops
    if rank != 0:  # only their names and shapes are used
        drawn = {name: torch.empty_like(weight, device="meta") for name, weight in drawn.items()}
    loader: Any = type(begun)
    model: PreTrainedModel = loader.from_pretrained(
        None, config=begun.config, state_dict=drawn, dtype=master_dtype(config), **_options(config)
    )
    cast("Any", model)._weight_conversions = None  # nothing was stored, so it is saved like a new model
    return model


def forget_unused_conversions(model: Any) -> None:
    """Let a model be saved with the names of its stored weights.

    transformers reverses the renamings of loading when it saves. Under ZeRO-3 it keeps all renamings of the
    architecture, also unused ones (5.23, integrations/deepspeed.py), and would save Gemma 3's layers with a prefix that
    no file has.
    """
    noted = getattr(model, "_weight_conversions", None)
    if noted is not None:
        model._weight_conversions = [conversion for conversion in noted if conversion.was_used()]


def _read(
    config: RunConfig, architecture: PretrainedConfig, device: torch.device | Literal["auto"] | None
) -> PreTrainedModel:
    options = _options(config)
    if config.peft.method is PeftMethod.qlora:
        options["quantization_config"] = four_bit(config)
    elif device == "auto":
        options["device_map"] = device
    elif device is not None and device.type != "cpu" and stays_whole(config):
        options["device_map"] = {"": device}
    location = model_location(config.model)
    try:
        model, info = auto_class(architecture).from_pretrained(
            location,
            revision=config.model.revision,
            config=architecture,
            dtype=master_dtype(config),
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError) as error:
        raise hub_problem(error, "model", location, config.model.revision) from error
    # The library's own report also covers weights that are converted while they are read.
    kinds = {kind: sorted(map(str, info.get(f"{kind}_keys") or ())) for kind in ("missing", "unexpected", "mismatched")}
    require_complete(**kinds, place=location)
    forget_unused_conversions(model)
    loaded: PreTrainedModel = model
    return loaded
