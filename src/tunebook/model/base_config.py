"""A base model's config.json, unchanged: read from its folder or from the hub's cache, without network access."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tunebook.config.book import resolve_path
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError

DTYPES = ("float32", "float16", "bfloat16")
# Models with bidirectional attention unless their config.json calls them decoders: each would predict a word from
# itself. transformers has a causal head for each. XLM declares a decoder by `causal`; XLNet cannot.
ENCODERS = frozenset({
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xlnet", "xmod",
})  # fmt: skip
# Encoder-decoders for text: they read all of the text before they write. transformers has no causal head for them.
ENCODER_DECODERS = frozenset({
    "encoder-decoder", "fsmt", "led", "longt5", "m2m_100", "mt5", "nllb-moe", "pegasus_x", "switch_transformers", "t5",
    "t5gemma", "t5gemma2", "umt5",
})  # fmt: skip
# A class's purpose, if its name contains one: LlamaForSequenceClassification does not have a language model head.
# Keys of a config.json for the most tokens of a document; architectures name them differently.
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_PURPOSE = re.compile(r"\w+?For([A-Z]\w+)")
_TEXT_PURPOSES = ("CausalLM", "ConditionalGeneration")  # the second also for models of text and images
# transformers' tables of a class for each model_type: of causal language models, and of other kinds of models, the
# most informative first.
_AUTO_FILE = ("models", "auto", "modeling_auto.py")
_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_OTHER_KINDS = {
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES": "a model of images or sound and text",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "an encoder-decoder",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "an encoder",
    "MODEL_MAPPING_NAMES": "a model without an output head over words",
}


def model_folder_problem(model: ModelConfig) -> str | None:
    """Why `model.path` contains no model; None if it has a config.json or another key names the model."""
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
    """Whether the model's class is, or without a local config.json may be, code from its repository."""
    if not model.trust_remote_code:
        return False
    config = read_config(model)
    auto_map = {} if config is None else config.get("auto_map") or {}
    return config is None or any(str(name).startswith("AutoModel") for name in auto_map)


def has_own_code(model: ModelConfig, config: dict[str, Any]) -> bool:
    """Whether the config.json makes code from the model's repository run."""
    return model.trust_remote_code and bool(config.get("auto_map"))


def architecture_of(config: dict[str, Any]) -> str:
    """The first architecture that a config.json names, in a list or as a string; empty if there is none."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else named
    return first if isinstance(first, str) else ""


def first_stated(config: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The value of the first of these keys that a config.json has; architectures name the same size differently."""
    return config.get(stated_key(config, keys))


def stated_key(config: dict[str, Any], keys: tuple[str, ...]) -> str:
    """The first of these keys with a value; if none has one, the first key, which most architectures use."""
    return next((key for key in keys if config.get(key) is not None), keys[0])


def read_vocab_size(model: ModelConfig) -> int | None:
    """The number of token embeddings; None if unknown before the model is loaded."""
    if model.facts is not None:
        return model.facts.vocab_size
    config = read_config(model) or {}
    stated = config.get("text_config", config).get("vocab_size")  # for text and images: in the language part
    return stated if isinstance(stated, int) else None


def read_dtype(model: ModelConfig) -> str | None:
    """The number format of the published weights: float32, float16 or bfloat16; None if unknown."""
    if model.facts is not None:
        return model.facts.dtype
    config = read_config(model)
    return dtype_of(config) if config is not None else None


def dtype_of(config: dict[str, Any]) -> str | None:
    """The number format in which transformers loads the weights: float32 by default; None if unsupported here."""
    dtype = stated_dtype(config)
    return "float32" if dtype is None else dtype if dtype in DTYPES else None


def stated_dtype(config: dict[str, Any]) -> Any:
    """The number format in a config.json, under its present or its former key; None without one."""
    places = (config, config.get("text_config", {}))
    return next((found for place in places if (found := first_stated(place, ("dtype", "torch_dtype")))), None)


def read_quantizer(model: ModelConfig) -> str | None:
    """The quantization method of the stored weights by transformers' name, such as gptq; None if not quantized."""
    config = _config_at_hand(model)
    return quantizer_of(config) if config is not None else None


def quantizer_of(config: dict[str, Any]) -> str | None:
    """The quantization method of the stored weights by a config.json; None if it has none."""
    places = (config, config.get("text_config", {}))
    stated = next((found for place in places if (found := place.get("quantization_config")) is not None), None)
    if not isinstance(stated, dict):
        return None if stated is None else str(stated)
    method = str(stated.get("quant_method") or "bitsandbytes")
    if method != "bitsandbytes":
        return method
    return "bitsandbytes_4bit" if stated.get("load_in_4bit") else "bitsandbytes_8bit"


def why_not_causal(model: ModelConfig) -> str | None:
    """Why the model by its config.json cannot continue a text; None if it may."""
    config = _config_at_hand(model)
    return why_config_is_not_causal(model, config) if config is not None else None


def why_config_is_not_causal(model: ModelConfig, config: dict[str, Any]) -> str | None:
    """`why_not_causal` for a config.json that was read already."""
    if has_own_code(model, config):  # that code decides
        return None
    architecture = architecture_of(config)
    purpose = _PURPOSE.fullmatch(architecture)
    if purpose is not None and not purpose[1].startswith(_TEXT_PURPOSES):
        return f"{architecture} is made for {_in_words(purpose[1])}, not to continue a text"
    if config.get("model_type") in ENCODERS and not (config.get("is_decoder") or config.get("causal")):
        return f"{architecture or config['model_type']} is an encoder: its attention looks both ways"
    if config.get("model_type") in ENCODER_DECODERS:
        return f"{architecture or config['model_type']} is an encoder-decoder: it reads all of a text before it writes"
    kind = str(config.get("model_type"))
    if (other := kind_without_causal_class(kind)) is None:
        return None
    return f"{architecture or kind} is {other}: AutoModelForCausalLM of transformers loads no model_type={kind}"


def kind_without_causal_class(model_type: str) -> str | None:
    """What a model is that transformers knows and AutoModelForCausalLM does not load; None for all others."""
    if model_type in causal_classes():
        return None
    return next((words for table, words in _OTHER_KINDS.items() if model_type in _auto_classes(table)), None)


def causal_classes() -> dict[str, list[str]]:
    """The classes that AutoModelForCausalLM loads, by model_type; empty without transformers."""
    return _auto_classes(_CAUSAL)


@cache
def _auto_classes(table: str) -> dict[str, list[str]]:
    """One of transformers' tables of classes by model_type, from its source: importing it would import torch."""
    if (stated := _auto_tables().get(table)) is None:
        return {}
    found: dict[str, list[str]] = {}
    within: set[ast.AST] = set()
    for node in ast.walk(stated):
        if isinstance(node, ast.Name):  # another table, whose entries this one has too
            found |= _auto_classes(node.id)
        if isinstance(node, ast.Tuple) and node not in within:
            within |= {*ast.walk(node)}  # several classes of one model_type
            name, *classes = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            found[str(name)] = [str(each) for each in classes]
    return found


@cache
def _auto_tables() -> dict[str, ast.expr]:
    """What transformers' source assigns to the names of its tables; empty without transformers."""
    package = find_spec("transformers")
    folder = next(iter(package.submodule_search_locations or ()), None) if package is not None else None
    file = Path(folder, *_AUTO_FILE) if folder is not None else None
    if file is None or not file.is_file():
        return {}
    statements = ast.parse(file.read_text(encoding="utf-8")).body
    assigned = (each for each in statements if isinstance(each, ast.Assign))
    return {each.targets[0].id: each.value for each in assigned if isinstance(each.targets[0], ast.Name)}


def _in_words(name: str) -> str:
    """SequenceClassification as sequence classification, MaskedLM as masked LM."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", name)
    return " ".join(word if word.isupper() else word.lower() for word in words)


def _config_at_hand(model: ModelConfig) -> dict[str, Any] | None:
    """A local config.json that may contain more than the facts; None if there is none or it could not be read."""
    try:
        return read_config(model)
    except RequestError:
        return None


def config_file(model: ModelConfig) -> Path | None:
    """The config.json in a model's folder, or of a hub model in the hub's cache; None if it is missing."""
    if model.path is not None:
        return resolve_path(model.path) / "config.json"
    if model.name is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
    except HFValidationError:  # not a valid name on the hub: a rule reports it
        return None
    return Path(cached) if isinstance(cached, str) else None
