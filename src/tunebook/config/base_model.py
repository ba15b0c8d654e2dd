"""What planning needs to know of a base model, read from its config.json without torch, transformers or network.

A model group file carries the facts. Without them they are read here: from `model.path`, or for a hub model from the
copy that an earlier run left in the hub's cache. `None` means "cannot be known before the model is loaded".
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from tunebook.config.book import resolve_path
from tunebook.config.schema import ModelConfig, ModelFacts
from tunebook.errors import RequestError

# Older architectures name the same sizes differently; the first name found counts.
_NAMES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "n_head_kv", "num_attention_heads", "n_head", "n_heads"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
# Decoders whose feed-forward block is two matrices; all later ones have three (gate, up, down).
_UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "phi", "codegen")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_DTYPES = ("float32", "float16", "bfloat16")


def model_folder_problem(model: ModelConfig) -> str | None:
    """Why `model.path` holds no model, in words; None where it has a config.json or another key names the model."""
    if not model.path:
        return None
    folder = resolve_path(model.path)
    if (folder / "config.json").is_file():
        return None
    what = "has no config.json" if folder.is_dir() else "is a file" if folder.is_file() else "does not exist"
    return (
        f"the folder {folder} {what}; a model is a folder in Hugging Face's layout (config.json, tokenizer.json, "
        "*.safetensors)"
    )


def read_config(model: ModelConfig) -> dict[str, Any] | None:
    """A model's config.json, or None where there is none at hand.

    Raises: RequestError when the file is there but is not a JSON object.
    """
    file = _config_file(model)
    if file is None or not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{file} cannot be read as JSON ({error}); download or copy the model again", problem_id="model-config"
        ) from error
    if not isinstance(config, dict):
        raise RequestError(
            f"{file} holds no JSON object, so it is no model's config.json; name the model's own folder in model.path",
            problem_id="model-config",
        )
    return config


def read_facts(model: ModelConfig) -> ModelFacts | None:
    """The facts of a model: its group file's, else read from its config.json; None where a size is not stated there.

    Raises: RequestError when the file cannot be read, or states a size below one.
    """
    if model.facts is not None:
        return model.facts
    config = read_config(model)
    if config is None:
        return None
    text = config.get("text_config", config)  # a model of text and images keeps its language part there
    sizes = {name: _first_stated(text, keys) for name, keys in _NAMES.items()}
    _refuse_sizes_below_one(model, sizes)
    if sizes["intermediate_size"] is None and sizes["hidden_size"] is not None:
        sizes["intermediate_size"] = 4 * sizes["hidden_size"]  # what an absent size means in GPT-2 and its kin
    architectures = config.get("architectures") or []
    dtype = _dtype_of(config) or _dtype_of(text)
    if not architectures or dtype is None or any(not isinstance(size, int) for size in sizes.values()):
        return None
    is_tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", True)))
    num_parameters = _num_parameters(model, text, sizes, is_tied)
    if num_parameters is None:
        return None
    return ModelFacts(
        architecture=architectures[0], num_parameters=num_parameters, tie_word_embeddings=is_tied, dtype=dtype, **sizes
    )


def _first_stated(config: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _refuse_sizes_below_one(model: ModelConfig, sizes: dict[str, Any]) -> None:
    for name, size in sizes.items():
        if isinstance(size, int | float) and size < 1:
            raise RequestError(
                f"{_config_file(model)} says {name}={size}, and a model has at least 1; correct the file or copy the "
                "model again",
                problem_id="model-config",
            )


def read_dtype(model: ModelConfig) -> str | None:
    """The number format of the published weights: float32, float16, bfloat16, or None where it is not known yet."""
    if model.facts is not None:
        return model.facts.dtype
    config = read_config(model)
    return _dtype_of(config) if config is not None else None


def _dtype_of(config: dict[str, Any]) -> str | None:
    dtype = config.get("dtype") or config.get("torch_dtype")  # renamed in transformers 5
    return dtype if dtype in _DTYPES else None


def _config_file(model: ModelConfig) -> Path | None:
    if model.path is not None:
        return resolve_path(model.path) / "config.json"
    if model.name is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
    except HFValidationError:  # not the form of a name on the hub: a rule says so
        return None
    return Path(cached) if isinstance(cached, str) else None


def _num_parameters(model: ModelConfig, text: dict[str, Any], sizes: dict[str, Any], is_tied: bool) -> int | None:
    """Counted in the safetensors headers where they are at hand, else from the sizes of a dense decoder."""
    counted = _count_in_headers(model)
    if counted is not None:
        return counted
    if any(text.get(key) for key in _EXPERT_KEYS):
        return None  # each mixture of experts counts its layers differently: the meta device knows, we do not
    hidden, layers, vocabulary = sizes["hidden_size"], sizes["num_layers"], sizes["vocab_size"]
    head_size = text.get("head_dim") or hidden // sizes["num_attention_heads"]
    queries, keys = sizes["num_attention_heads"] * head_size, sizes["num_key_value_heads"] * head_size
    num_matrices = 2 if text.get("model_type") in _UNGATED else 3
    per_layer = 2 * hidden * (queries + keys) + num_matrices * hidden * sizes["intermediate_size"]
    return int(vocabulary * hidden * (1 if is_tied else 2) + layers * (per_layer + 2 * hidden) + hidden)


def _count_in_headers(model: ModelConfig) -> int | None:
    """The parameters stored in a folder's safetensors files; tied embeddings are stored once. None without files."""
    if model.path is None:
        return None
    files = sorted(resolve_path(model.path).glob("*.safetensors"))
    try:
        return sum(_count_in_header(file) for file in files) or None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a damaged file is reported by whoever loads the weights


def _count_in_header(file: Path) -> int:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > 100_000_000:  # the format's own limit; anything longer is not a header
            raise ValueError(f"{file} is no safetensors file")
        header = json.loads(stream.read(length))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
