"""A tokenizer's files, one hash of their content, and chat templates by name, without importing transformers or TRL.

`prepare` computes the hash at every start to detect changes, so it must be much faster than loading the tokenizer.
A template is `chatml`, a file, or one of those that TRL ships (`trl/chat_templates`). For most of them TRL has a
training version: it writes every turn the same way whatever follows, also the reasoning of earlier answers, and marks
the assistant's words with `{% generation %}`.
"""

from __future__ import annotations

import hashlib
import json
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tunebook.config.book import (
    CHATML_TEMPLATE,
    LIBRARY_PREFIX,
    TRAINING_TEMPLATE,
    is_in_book,
    resolve_path,
)
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError, did_you_mean
from tunebook.model.hub import fetch_files

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_CHATML_NAME = f"{LIBRARY_PREFIX}qwen3_instruct_2507_training"  # it writes tools, and no system prompt of its own
_TRAINING_SUFFIX = "_training"
GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# One of these is required: from config.json alone transformers would silently make a tokenizer with one token.
VOCABULARY_FILES = (
    "tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json",
)  # fmt: skip
PROCESSOR_TEMPLATE_FILE = "chat_template.json"  # of older models for images, whose tokenizers have no template
# Of a model for images and text, how it reads images
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# Other files that affect the tokens of a text, or the token that ends a turn.
_SETTINGS_FILES = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "generation_config.json",
    "chat_template.jinja", PROCESSOR_TEMPLATE_FILE, *PROCESSOR_FILES,
)  # fmt: skip
_PATTERNS = (*VOCABULARY_FILES, *_SETTINGS_FILES, "*.tiktoken", "additional_chat_templates/*", "config.json")


def has_vocabulary(folder: Path) -> bool:
    """True if a folder contains a tokenizer."""
    return any((folder / name).is_file() for name in VOCABULARY_FILES) or any(folder.glob("*.tiktoken"))


def tokenizer_folder(model: ModelConfig) -> Path:
    """The folder with the tokenizer's files, downloaded if it is on the hub.

    For a hub model the folder's name is the commit. Raises: RequestError if the folder does not exist or contains no
    tokenizer, or if the hub cannot be reached and the cache has no copy.
    """
    patterns = [*_PATTERNS, "*.py"] if model.trust_remote_code else _PATTERNS
    if model.tokenizer is not None:
        key, folder = "model.tokenizer", resolve_path(model.tokenizer)
        if not folder.is_dir() and _may_be_on_hub(model.tokenizer):
            folder = fetch_files(model.tokenizer, None, patterns, "tokenizer", key)
    elif model.path is not None:
        key, folder = "model.path", resolve_path(model.path)
    elif model.name is not None:
        key, folder = "model.name", fetch_files(model.name, model.revision, patterns, "tokenizer")
    else:
        raise RequestError(
            "no model is named, so there is no tokenizer; type model=ORG/NAME or model=FOLDER",
            problem_id="model-not-named",
        )
    if has_vocabulary(folder):
        return folder
    missing = f"has no tokenizer (none of {', '.join(VOCABULARY_FILES)})" if folder.is_dir() else "is no folder"
    raise RequestError(
        f"{key}: {folder} {missing}; copy the tokenizer's files there, or name another tokenizer with "
        "model.tokenizer=DIR or organization/name",
        problem_id="tokenizer-not-found",
    )


def processor_files(folder: Path) -> list[Path]:
    """The files in a model's folder that say how it reads images."""
    return [folder / name for name in PROCESSOR_FILES if (folder / name).is_file()]


def tokenizer_files_hash(model: ModelConfig) -> str:
    """A hash of everything that affects how texts become tokens: files, chat template, and special token overrides.

    `tokenizer.tokenizer_hash` is a different hash: it needs the loaded tokenizer and does not depend on how the files
    are written.
    """
    folder = tokenizer_folder(model)
    named = [folder / name for name in (*VOCABULARY_FILES, *_SETTINGS_FILES)]
    files = [*named, *folder.glob("*.tiktoken"), *folder.glob("additional_chat_templates/*.jinja")]
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.is_file()):
        digest.update(f"{file.relative_to(folder)}:{file.stat().st_size}:".encode())
        digest.update(file.read_bytes())
    # The values of config.json that choose the tokenizer's class
    config = read_json_file(folder / "config.json") if (folder / "config.json").is_file() else None
    kind = [config.get("model_type"), config.get("tokenizer_class")] if config is not None else []
    settings = [model.pad_token, model.eos_token, model.trust_remote_code, kind]
    digest.update(json.dumps(settings).encode())
    if model.chat_template == TRAINING_TEMPLATE:  # which depends on the tokenizer's own, in its files
        digest.update(f"{TRAINING_TEMPLATE}, trl {version('trl')}".encode())
    elif model.chat_template is not None:
        digest.update(read_chat_template(model.chat_template).encode())
    return digest.hexdigest()


def _may_be_on_hub(text: str) -> bool:
    """True if a text can be `organization/name`: without a leading dot or tilde, and with at most one slash."""
    return not is_in_book(text) and not text.startswith((".", "~", "/")) and text.count("/") <= 1


def read_json_file(file: Path) -> dict[str, Any]:
    """The content of a JSON file of a model. Raises: RequestError if it is no JSON."""
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"{file} is not JSON: {error}; copy it again", problem_id="tokenizer-broken") from error
    return content


def read_chat_template(text: str, own: str | None = None) -> str:
    """The template that `model.chat_template` names; `own` is the tokenizer's, which `training` replaces.

    Raises: RequestError if there is none of that name.
    """
    if text == TRAINING_TEMPLATE:
        return _training_version(own)
    if text == CHATML_TEMPLATE:
        text = _CHATML_NAME
    if text.startswith(LIBRARY_PREFIX):
        return _from_library(text)
    path = resolve_path(text)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        reason = f"{path} is not UTF-8 text: {error}"
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror or error}"
    raise RequestError(
        f"model.chat_template={text}: {reason}; name a Jinja file, {CHATML_TEMPLATE}, {TRAINING_TEMPLATE}, or trl:NAME "
        "for one of TRL's, or leave it out to use the tokenizer's own",
        problem_id="chat-template-not-found",
    )


def _library_templates() -> dict[str, Path]:
    """TRL's templates by name."""
    package = find_spec("trl")
    folders = package.submodule_search_locations if package is not None else None
    folder = Path(next(iter(folders))) / "chat_templates" if folders else None
    return {} if folder is None else {file.stem: file for file in sorted(folder.glob("*.jinja"))}


def _from_library(text: str) -> str:
    name, files = text.removeprefix(LIBRARY_PREFIX), _library_templates()
    if name not in files:
        known = ", ".join(files)
        raise RequestError(
            f"model.chat_template={text}: TRL {version('trl')} has no template '{name}'."
            f"{did_you_mean(name, files, f'It has: {known}')}",
            problem_id="chat-template-not-found",
        )
    return files[name].read_text(encoding="utf-8")


def _training_version(own: str | None) -> str:
    files = _library_templates()
    trained = {name.removesuffix(_TRAINING_SUFFIX): file for name, file in files.items() if _TRAINING_SUFFIX in name}
    for name, file in files.items():
        if own is not None and file.read_text(encoding="utf-8").strip() == own.strip():
            if name in trained:
                return trained[name].read_text(encoding="utf-8")
            if GENERATION_MARKER.search(own):  # it has them itself
                return own
    raise RequestError(
        f"model.chat_template={TRAINING_TEMPLATE}: TRL {version('trl')} has no training version of this tokenizer's "
        f"template, which it compares letter by letter; type model.chat_template={CHATML_TEMPLATE}, name a file, or "
        "leave it out to use the tokenizer's own",
        problem_id="chat-template-not-found",
    )
