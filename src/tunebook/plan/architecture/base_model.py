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
from tunebook.facts.architectures import CHOSEN_EXPERTS, EXPERTS
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
from tunebook.plan.architecture import trace_file, trace_stated

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
_MAX_PARAMETERS = 10**15  # the largest number that the rules allow
_HOW_TO_CORRECT = "correct the file or download or copy the model again"
# peft=qlora quantizes a base to this format while reading it, and accepts it as it is. Tunebook trains over no other
# quantization.
OWN_QUANTIZER = "bitsandbytes_4bit"


def read_facts(model: ModelConfig, **tracing: Any) -> ModelFacts | None:
    """Return the model's facts from its group file or its config.json; None if neither is available.

    Layers of models that are not in the book are traced once on the meta device, which takes a while, depending on
    `tracing`, the options of `trace_file`. Raises: RequestError if the file cannot be read, states impossible sizes, or
    names an unknown architecture.
    """
    if model.facts is not None:
        if model.facts.measured is None:
            model.facts.measured = trace_stated(model.facts, **tracing)
        return model.facts
    config, file = read_config(model), config_file(model)
    if config is None or file is None:
        return facts[1] if (facts := facts_of_book(model)) is not None else None
    text = config.get("text_config", config)  # a multimodal model keeps its language part there
    sizes = {name: first_stated(text, keys) for name, keys in _NAMES.items()}
    _refuse_impossible(file, text, sizes)
    _refuse_unknown_dtype(file, config)
    return None if _is_refused_anyway(model, config) else _traced(model, file, sizes, **tracing)


def facts_of_book(model: ModelConfig) -> tuple[str, ModelFacts] | None:
    """The book's model of this name on the hub, and its facts; None if there is none, or it may be another model.

    The newest revision is compared with the facts when the model is loaded; another one may differ on purpose.
    """
    if model.name is None or model.path is not None or model.revision is not None or model.trust_remote_code:
        return None
    return facts_of_hub_name(model.name)


def _is_refused_anyway(model: ModelConfig, config: dict[str, Any]) -> bool:
    """Whether a rule refuses the model whatever its facts are, so that tracing would be wasted."""
    quantizer = None if model.weights is Weights.random else quantizer_of(config)
    return quantizer not in (None, OWN_QUANTIZER) or why_config_is_not_causal(model, config) is not None


def _traced(model: ModelConfig, file: Path, sizes: dict[str, Any], **tracing: Any) -> ModelFacts | None:
    """The facts as traced on the meta device; without torch those of the book's model of this name, or None.

    Raises: RequestError if it is not installed and the file relies on transformers' defaults.
    """
    traced = trace_file(file, trust_remote_code=model.trust_remote_code, **tracing)
    if traced is not None:
        _refuse_too_large(file, traced.num_parameters)
        return traced
    if (named := _named_facts(model, sizes)) is not None:
        return named
    unstated = [_NAMES[name][0] for name in ("num_layers", "vocab_size") if sizes[name] is None]
    if unstated:
        raise broken_config(
            f"{file} states no {' and no '.join(unstated)}, and transformers, whose defaults stand for them, is not "
            "installed here with torch; state them in the file, or type: pip install torch transformers"
        )
    return None


def _named_facts(model: ModelConfig, sizes: dict[str, Any]) -> ModelFacts | None:
    """The facts of the book's model of this name, if its cached config.json states no other sizes."""
    found = facts_of_book(model)
    if found is None or any(size is not None and size != getattr(found[1], name) for name, size in sizes.items()):
        return None
    return found[1]


def _refuse_impossible(file: Path, text: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Reject impossible sizes, with the key names of this file.

    Raises: RequestError for a size that is not a whole number or below one, for heads that do not divide, and for more
    experts chosen than exist.
    """
    called = {name: stated_key(text, keys) for name, keys in _NAMES.items()}
    for name, size in sizes.items():
        key = called[name]
        is_number = isinstance(size, int | float) and not isinstance(size, bool)
        least = _MIN_SIZES.get(name, 1)
        if is_number and size < least:
            raise broken_config(f"{file} says {key}={size}, and a model has at least {least}; {_HOW_TO_CORRECT}")
        if is_number and size > _MAX_SIZE:
            raise broken_config(
                f"{file} says {key}={json.dumps(size)[:20]}, and no model has more than {_MAX_SIZE}; {_HOW_TO_CORRECT}"
            )
        if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
            if isinstance(size, list):  # one per layer in some architectures; only the meta device can count it
                continue
            raise broken_config(f"{file} says {key}={json.dumps(size)}, which is not an integer; {_HOW_TO_CORRECT}")
    _refuse_too_large(file, _least_parameters(sizes))
    _refuse_absent_experts(file, text)
    hidden, heads, keys = (sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if not all(isinstance(size, int) for size in (hidden, heads, keys)):
        return
    if hidden % heads and not text.get("head_dim"):
        raise broken_config(
            f"{file} says {called['hidden_size']}={hidden} and {called['num_attention_heads']}={heads}, which does not "
            f"divide it, and no head_dim; {_HOW_TO_CORRECT}"
        )
    if heads % keys:
        raise broken_config(
            f"{file} says {called['num_attention_heads']}={heads} and {called['num_key_value_heads']}={keys}, which "
            f"does not divide them: each key serves the same number of queries; {_HOW_TO_CORRECT}"
        )


def _refuse_absent_experts(file: Path, text: dict[str, Any]) -> None:
    """Raise RequestError if a token is sent to more experts than exist: a router can choose each once.

    Some dense models state one expert or none; those numbers are not a router's.
    """
    stated = (next((key for key in keys if isinstance(text.get(key), int)), None) for keys in (CHOSEN_EXPERTS, EXPERTS))
    chosen, experts = stated
    if chosen is None or experts is None or not 1 < text[experts] < text[chosen]:
        return
    raise broken_config(
        f"{file} says {chosen}={text[chosen]} and {experts}={text[experts]}: a token cannot be sent to more experts "
        f"than there are; {_HOW_TO_CORRECT}"
    )


def _least_parameters(sizes: dict[str, Any]) -> int:
    """Approximate minimum number of parameters for these sizes in any architecture; unknown sizes count as one."""
    names = ("num_layers", "hidden_size", "intermediate_size", "vocab_size")
    layers, hidden, inner, words = (size if isinstance(size := sizes[name], int) else 1 for name in names)
    return hidden * (words + layers * (hidden + inner))


def _refuse_too_large(file: Path, num_parameters: int) -> None:
    """Raise RequestError for sizes that are possible separately but too large together."""
    if num_parameters > _MAX_PARAMETERS:
        made, most = (f"{number:.2g}".replace("e+", "e") for number in (num_parameters, _MAX_PARAMETERS))
        raise broken_config(
            f"{file} says sizes that together make at least {made} parameters, and no model has more than "
            f"{most}; {_HOW_TO_CORRECT}"
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
