"""A base model's config.json, unchanged: read from its folder or from the hub's cache, without network access."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tunebook.config.book import resolve_path
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError

DTYPES = ("float32", "float16", "bfloat16")
_TEXT_PURPOSES = ("CausalLM", "ConditionalGeneration")  # the second also for models of text and images


def model_folder_problem(model: ModelConfig) -> str | None:
    """Why `model.path` contains no model; None if it has a config.json or another key names the model."""
    if not model.path:
        return None
    folder = resolve_path(model.path)
    if (folder / "config.json").is_file():
        return None
    if (folder / "run.yaml").is_file():
        return f"the folder {folder} is a run; model.run={model.path} starts from its model"
    if (folder / "adapter_config.json").is_file():
        return f"the folder {folder} holds an adapter alone; merge it into its base: tunebook export RUN --merge"
    problem = "has no config.json" if folder.is_dir() else "does not exist"
    return (
        f"the folder {folder} {problem}; a model is a folder in Hugging Face's layout (config.json, tokenizer.json, "
        "*.safetensors)"
    )


def read_config(model: ModelConfig) -> dict[str, Any] | None:
    """A model's config.json; None if there is no local copy.

    Raises: RequestError if the file exists but is not a model's config.json.
    """
    file = config_file(model)
    if file is None or not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise broken_config(f"{file} cannot be read as JSON ({error}); download or copy the model again") from error
    is_object = isinstance(config, dict) and isinstance(config.get("text_config", {}), dict)
    if not is_object or not (config.get("model_type") or config.get("architectures")):
        raise broken_config(
            f"{file} is no object with model_type or architectures, so it is no model's config.json; name the model's "
            "own folder: model=FOLDER"
        )
    stated: dict[str, Any] = config
    return stated


def broken_config(message: str) -> RequestError:
    """The error for a config.json that cannot be used."""
    return RequestError(message, problem_id="model-config")


def brings_code(model: ModelConfig) -> bool:
    """Whether the model's class is, or without a local config.json may be, code from its repository."""
    if not model.trust_remote_code:
        return False
    config = read_config(model)
    auto_map = {} if config is None else config.get("auto_map") or {}
    return config is None or any(str(name).startswith("AutoModel") for name in auto_map)


def architecture_of(config: dict[str, Any]) -> str:
    """The first architecture that a config.json names, in a list or as a string; empty if there is none."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else named
    return first if isinstance(first, str) else ""


def read_vocab_size(model: ModelConfig) -> int | None:
    """The number of token embeddings; None if unknown before the model is loaded."""
    if model.facts is not None:
        return model.facts.vocab_size
    config = read_config(model) or {}
    stated = config.get("text_config", config).get("vocab_size")  # for text and images: in the language part
    return stated if isinstance(stated, int) else None


def read_dtype(model: ModelConfig) -> str | None:
    """The number format of the published weights: float32 (the default), float16 or bfloat16; None if unknown."""
    if model.facts is not None:
        return model.facts.dtype
    if (config := read_config(model)) is None:
        return None
    places = (config, config.get("text_config", {}))
    stated = [place[key] for place in places for key in ("dtype", "torch_dtype") if place.get(key) is not None]
    dtype = stated[0] if stated else "float32"
    return dtype if dtype in DTYPES else None


def read_quantizer(model: ModelConfig) -> str | None:
    """The quantization method of the stored weights by transformers' name, such as gptq; None if not quantized."""
    config = read_config(model) or {}
    stated = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if stated is None:
        return None
    method = str(stated.get("quant_method") or "bitsandbytes")
    if method != "bitsandbytes":
        return method
    return "bitsandbytes_4bit" if stated.get("load_in_4bit") else "bitsandbytes_8bit"


def non_causal_reason(model: ModelConfig) -> str | None:
    """Why the model by its config.json cannot continue a text; None if it may.

    A class is named after its purpose: BertForMaskedLM sees the token that it predicts.
    """
    config = read_config(model)
    if config is None or (model.trust_remote_code and config.get("auto_map")):  # that code decides
        return None
    architecture = architecture_of(config)
    _, has_purpose, purpose = architecture.rpartition("For")
    if has_purpose and not purpose.startswith(_TEXT_PURPOSES):
        return f"{architecture} is made for {purpose}, not to continue a text"
    return None


def config_file(model: ModelConfig) -> Path | None:
    """The config.json in a model's folder, or of a hub model in the hub's cache; None if it is missing.

    Raises: RequestError if the hub cannot have a model of this name.
    """
    if model.path is not None:
        return resolve_path(model.path) / "config.json"
    if model.name is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
    except HFValidationError as error:
        raise RequestError(
            f"model.name={model.name} is not the name of a model on the hub, ORG/NAME; of a model in a folder type "
            "model=FOLDER",
            problem_id="hub-name-form",
        ) from error
    return Path(cached) if isinstance(cached, str) else None
