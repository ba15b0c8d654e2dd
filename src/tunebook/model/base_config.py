"""A base model's config.json, as it is: read from its folder, or from the copy in the hub's cache, without network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tunebook.config.book import resolve_path
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError

DTYPES = ("float32", "float16", "bfloat16")
# Whose attention looks both ways unless their config.json calls them decoders: a word would be predicted from itself.
# transformers has a causal head for each. XLM says it by `causal`, XLNet not at all.
ENCODERS = frozenset({
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xlnet", "xmod",
})  # fmt: skip
# Those of text that read all of it before they write, none of which transformers has a causal head for.
ENCODER_DECODERS = frozenset({
    "encoder-decoder", "fsmt", "led", "longt5", "m2m_100", "mt5", "nllb-moe", "pegasus_x", "switch_transformers", "t5",
    "t5gemma", "t5gemma2", "umt5",
})  # fmt: skip
# What a class is made for, where its name says so: LlamaForSequenceClassification has another head than words.
_PURPOSE = re.compile(r"\w+?For([A-Z]\w+)")
_TEXT_PURPOSES = ("CausalLM", "ConditionalGeneration")  # the second also of models of text and images


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

    Raises: RequestError when the file is there but is no model's config.json.
    """
    file = config_file(model)
    if file is None or not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise broken_config(f"{file} cannot be read as JSON ({error}); download or copy the model again") from error
    if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
        raise broken_config(
            f"{file} holds no JSON object, so it is no model's config.json; name the model's own folder in model.path"
        )
    if not config.get("model_type") and not config.get("architectures"):
        raise broken_config(
            f"{file} names neither model_type nor architectures, so it is no model's config.json; name the model's own "
            "folder in model.path"
        )
    return config


def broken_config(message: str) -> RequestError:
    """The error for a config.json that cannot be used."""
    return RequestError(message, problem_id="model-config")


def brings_code(model: ModelConfig) -> bool:
    """Whether the model's class is its repository's own, or may be, where its config.json is not at hand."""
    if not model.trust_remote_code:
        return False
    config = read_config(model)
    auto_map = {} if config is None else config.get("auto_map") or {}
    return config is None or any(str(name).startswith("AutoModel") for name in auto_map)


def has_own_code(model: ModelConfig, config: dict[str, Any]) -> bool:
    """Whether code from the model's repository runs, by its config.json."""
    return model.trust_remote_code and bool(config.get("auto_map"))


def architecture_of(config: dict[str, Any]) -> str:
    """The first class that is named, in a list or alone; nothing where none is."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else named
    return first if isinstance(first, str) else ""


def first_stated(config: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The value of the first key that a config.json has; architectures name the same size differently."""
    return config.get(stated_key(config, keys))


def stated_key(config: dict[str, Any], keys: tuple[str, ...]) -> str:
    """The first of these that the file has a value of; where it has none, the first as most architectures say it."""
    return next((key for key in keys if config.get(key) is not None), keys[0])


def read_vocab_size(model: ModelConfig) -> int | None:
    """The tokens that the model has an embedding for; None where that is not known before it is loaded."""
    if model.facts is not None:
        return model.facts.vocab_size
    config = read_config(model) or {}
    stated = config.get("text_config", config).get("vocab_size")  # of text and images: in the language part
    return stated if isinstance(stated, int) else None


def read_dtype(model: ModelConfig) -> str | None:
    """The number format of the published weights: float32, float16, bfloat16, or None where it is not known yet."""
    if model.facts is not None:
        return model.facts.dtype
    config = read_config(model)
    return dtype_of(config) if config is not None else None


def dtype_of(config: dict[str, Any]) -> str | None:
    """What transformers makes of the weights: float32 where nothing is stated; None for a format that is not ours."""
    dtype = stated_dtype(config)
    return "float32" if dtype is None else dtype if dtype in DTYPES else None


def stated_dtype(config: dict[str, Any]) -> Any:
    """The number format that a config.json states, under its present or its former key; None without one."""
    places = (config, config.get("text_config", {}))
    return next((found for place in places if (found := first_stated(place, ("dtype", "torch_dtype")))), None)


def read_quantiser(model: ModelConfig) -> str | None:
    """What the stored weights are quantised by, in transformers' words, such as gptq; None where they are not."""
    config = _config_at_hand(model)
    return quantiser_of(config) if config is not None else None


def quantiser_of(config: dict[str, Any]) -> str | None:
    """What a config.json says that the stored weights are quantised by; None where it says nothing."""
    places = (config, config.get("text_config", {}))
    stated = next((found for place in places if (found := place.get("quantization_config")) is not None), None)
    if not isinstance(stated, dict):
        return None if stated is None else str(stated)
    method = str(stated.get("quant_method") or "bitsandbytes")
    if method != "bitsandbytes":
        return method
    return "bitsandbytes_4bit" if stated.get("load_in_4bit") else "bitsandbytes_8bit"


def why_not_causal(model: ModelConfig) -> str | None:
    """Why a model's config.json describes none that continues a text, in words; None where it may."""
    config = _config_at_hand(model)
    return why_config_is_not_causal(model, config) if config is not None else None


def why_config_is_not_causal(model: ModelConfig, config: dict[str, Any]) -> str | None:
    """`why_not_causal` of a config.json that was read."""
    if has_own_code(model, config):  # it decides
        return None
    architecture = architecture_of(config)
    purpose = _PURPOSE.fullmatch(architecture)
    if purpose is not None and not purpose[1].startswith(_TEXT_PURPOSES):
        return f"{architecture} is made for {_in_words(purpose[1])}, not to continue a text"
    if config.get("model_type") in ENCODERS and not (config.get("is_decoder") or config.get("causal")):
        return f"{architecture or config['model_type']} is an encoder: its attention looks both ways"
    if config.get("model_type") in ENCODER_DECODERS:
        return f"{architecture or config['model_type']} is an encoder-decoder: it reads all of a text before it writes"
    return None


def _in_words(name: str) -> str:
    """SequenceClassification as sequence classification, MaskedLM as masked LM."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", name)
    return " ".join(word if word.isupper() else word.lower() for word in words)


def _config_at_hand(model: ModelConfig) -> dict[str, Any] | None:
    """A config.json that may say more than the facts do; None where it is not here, or where reading the facts failed.

    The hub's cache, which takes an import, is not asked about a model whose layers are those of a model of the book.
    """
    layers = model.facts.measured if model.facts is not None else None
    if model.path is None and layers is not None and layers.is_of_the_book:
        return None
    try:
        return read_config(model)
    except RequestError:
        return None


def config_file(model: ModelConfig) -> Path | None:
    """The config.json of a folder, or of a hub model in the hub's cache; None where it is not there."""
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
