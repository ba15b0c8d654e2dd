"""Facts of a base model that planning needs, read from its config.json without weights or network.

A model group file carries the facts. Otherwise they are read here: from `model.path`, or for a hub model from the hub
cache of an earlier run. Without a cached config.json, the book's facts of a model of that name count. None if they are
unknown until the model is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tunebook.config.choices import Weights
from tunebook.config.model_facts import ModelFacts, facts_of_hub_name
from tunebook.config.schema import ModelConfig
from tunebook.model.base_config import (
    DTYPES,
    POSITIONS,
    broken_config,
    config_file,
    dtype_of,
    first_stated,
    quantizer_of,
    read_config,
    stated_dtype,
    stated_key,
    why_config_is_not_causal,
)
from tunebook.plan.architecture import facts_of_file, with_layers

# Older architectures use other names for the same sizes; the first name found counts.
_NAMES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "n_head_kv", "num_attention_heads", "n_head", "n_heads"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": POSITIONS,
}
_MIN_SIZES = {"vocab_size": 2, "max_position_embeddings": 2}  # prediction needs two words; other sizes need 1
_MAX_SIZE = 10**8  # limit of any size; Llama 4 has 10 million positions
# peft=qlora quantizes a base to this format while reading it, and accepts it as it is. Tunebook trains over no other
# quantization.
OWN_QUANTIZER = "bitsandbytes_4bit"


def read_facts(model: ModelConfig) -> ModelFacts | None:
    """Return the model's facts from its group file or its config.json; None if neither is available.

    Raises: RequestError if the file cannot be read, states impossible sizes, or names an unknown architecture.
    """
    if model.facts is not None:
        is_known = model.facts.measured is not None or model.trust_remote_code
        return model.facts if is_known else with_layers(model.facts)
    config, file = read_config(model), config_file(model)
    if config is None or file is None:
        return found[1] if (found := facts_of_book(model)) is not None else None
    text = config.get("text_config", config)  # a multimodal model keeps its language part there
    sizes = {name: first_stated(text, keys) for name, keys in _NAMES.items()}
    _refuse_impossible(file, text, sizes)
    _refuse_unknown_dtype(file, config)
    if _is_refused_anyway(model, config):
        return None
    built = facts_of_file(file, trust_remote_code=model.trust_remote_code)
    return built if built is not None else _named_facts(model, sizes)  # without torch


def facts_of_book(model: ModelConfig) -> tuple[str, ModelFacts] | None:
    """The book's model of this name on the hub, and its facts; None if there is none, or it may be another model.

    The newest revision is compared with the facts when the model is loaded; another one may differ on purpose.
    """
    if model.name is None or model.path is not None or model.revision is not None or model.trust_remote_code:
        return None
    found = facts_of_hub_name(model.name)
    return None if found is None else (found[0], with_layers(found[1]))


def _is_refused_anyway(model: ModelConfig, config: dict[str, Any]) -> bool:
    """Whether a rule refuses the model whatever its facts are, so that building it would be wasted."""
    quantizer = None if model.weights is Weights.random else quantizer_of(config)
    return quantizer not in (None, OWN_QUANTIZER) or why_config_is_not_causal(model, config) is not None


def _named_facts(model: ModelConfig, sizes: dict[str, Any]) -> ModelFacts | None:
    """The facts of the book's model of this name, if its cached config.json states no other sizes."""
    found = facts_of_book(model)
    if found is None or any(size is not None and size != getattr(found[1], name) for name, size in sizes.items()):
        return None
    return found[1]


def _refuse_impossible(file: Path, text: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Raise RequestError for a size that is no number of such things. transformers finds those that do not match."""
    for name, size in sizes.items():
        if size is None or isinstance(size, list):  # in some architectures one for each layer
            continue
        least = _MIN_SIZES.get(name, 1)
        if not isinstance(size, int) or isinstance(size, bool) or not least <= size <= _MAX_SIZE:
            raise broken_config(
                f"{file} says {stated_key(text, _NAMES[name])}={json.dumps(size)[:20]}, which is no integer from "
                f"{least} to {_MAX_SIZE}; correct the file, or download or copy the model again"
            )


def _refuse_unknown_dtype(file: Path, config: dict[str, Any]) -> None:
    """Raise RequestError for weights in a format that Tunebook cannot train.

    Another rule reports quantized weights in more detail.
    """
    dtype = stated_dtype(config)
    if dtype_of(config) is None and not isinstance(dtype, dict) and quantizer_of(config) is None:
        raise broken_config(
            f"{file} says dtype={json.dumps(dtype)}, and weights are trained from {', '.join(DTYPES)}; correct the "
            "file, or name a model that is published in one of these"
        )
