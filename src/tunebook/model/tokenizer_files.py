"""The folder of a tokenizer's files and one hash of their content, without importing transformers.

`prepare` computes the hash at every start to detect changes, so it must be much faster than loading the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tunebook.config.book import is_in_book, resolve_path
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError
from tunebook.model.chat_templates import template_identity
from tunebook.model.hub import hub_problem

# One of these is required: from config.json alone transformers would silently make a tokenizer with one token.
VOCABULARY_FILES = (
    "tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json",
)  # fmt: skip
# Other files that affect the tokens of a text, or the token that ends a turn.
SETTINGS_FILES = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "generation_config.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_PATTERNS = (*VOCABULARY_FILES, *SETTINGS_FILES, "*.tiktoken", "additional_chat_templates/*", "config.json")


def has_vocabulary(folder: Path) -> bool:
    """True if a folder contains a tokenizer."""
    return any((folder / name).is_file() for name in VOCABULARY_FILES) or any(folder.glob("*.tiktoken"))


def tokenizer_folder(model: ModelConfig) -> Path:
    """The folder with the tokenizer's files, downloaded if it is on the hub.

    For a hub model the folder's name is the commit. Raises: RequestError if the folder does not exist or contains no
    tokenizer, or if the hub cannot be reached and the cache has no copy.
    """
    key = _named_by(model)
    text = model.tokenizer or model.path
    if text is not None:
        folder = resolve_path(text)
        if folder.is_dir():
            return _with_vocabulary(folder, key)
        is_hub_name = model.tokenizer is not None and not is_in_book(text) and _looks_like_hub_name(text)
        if not is_hub_name:
            raise RequestError(
                f"{key}={text}: there is no folder {folder}; name a folder with a tokenizer.json"
                + (", or a name on the hub as organization/name" if model.tokenizer else ""),
                problem_id="tokenizer-not-found",
            )
        try:
            fetched = _fetch(text, None, key=key, trust_remote_code=model.trust_remote_code)
        except RequestError as error:
            message = f"{key}={text}: there is no folder {folder}, and {error.message}"
            raise RequestError(message, problem_id=error.problem_id) from error
        return _with_vocabulary(fetched, key)
    if model.name is None:
        raise RequestError(
            "neither model.name nor model.path is set, so there is no tokenizer; set model.name=organization/name "
            "(on the hub) or model.path=DIR",
            problem_id="model-not-named",
        )
    return _with_vocabulary(_fetch(model.name, model.revision, trust_remote_code=model.trust_remote_code), key)


def tokenizer_files_hash(model: ModelConfig) -> str:
    """A hash of everything that affects how texts become tokens: files, chat template, and special token overrides.

    `tokenizer.tokenizer_hash` is a different hash: it needs the loaded tokenizer and does not depend on how the files
    are written.
    """
    folder = tokenizer_folder(model)
    digest = hashlib.sha256()
    for file in _hashed_files(folder):
        digest.update(f"{file.relative_to(folder)}:{file.stat().st_size}:".encode())
        digest.update(file.read_bytes())
    settings = [model.pad_token, model.eos_token, model.trust_remote_code, _tokenizer_class(folder)]
    digest.update(json.dumps(settings).encode())
    if model.chat_template is not None:
        digest.update(template_identity(model.chat_template).encode())
    return digest.hexdigest()


def _named_by(model: ModelConfig) -> str:
    """The configuration key that names the tokenizer."""
    if model.tokenizer is not None:
        return "model.tokenizer"
    return "model.path" if model.path is not None else "model.name"


def _looks_like_hub_name(text: str) -> bool:
    """True if a text can be `organization/name`: without a leading dot or tilde, and with at most one slash."""
    return not text.startswith((".", "~", "/")) and text.count("/") <= 1


def _with_vocabulary(folder: Path, key: str) -> Path:
    if has_vocabulary(folder):
        return folder
    raise RequestError(
        f"{key}: {folder} holds no tokenizer (none of {', '.join(VOCABULARY_FILES)}); copy the tokenizer's files "
        "there, or name another one with model.tokenizer=DIR",
        problem_id="tokenizer-not-found",
    )


def _hashed_files(folder: Path) -> list[Path]:
    named = [folder / name for name in (*VOCABULARY_FILES, *SETTINGS_FILES)]
    found = [*named, *folder.glob("*.tiktoken"), *folder.glob("additional_chat_templates/*.jinja")]
    return sorted(file for file in found if file.is_file())


def _tokenizer_class(folder: Path) -> list[str | None]:
    """The values of config.json that choose the tokenizer's class."""
    file = folder / "config.json"
    if not file.is_file():
        return []
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"{file} is not JSON: {error}; copy it again", problem_id="tokenizer-broken") from error
    return [config.get("model_type"), config.get("tokenizer_class")]


def _fetch(
    name: str, revision: str | None, *, trust_remote_code: bool, key: str = "model.name=null model.path"
) -> Path:
    """The tokenizer's files from the hub, or from the cache if the hub cannot be reached."""
    from huggingface_hub import snapshot_download

    patterns = [*_PATTERNS, "*.py"] if trust_remote_code else list(_PATTERNS)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's own errors are subclasses of these
        raise hub_problem(error, "tokenizer", name, revision, key=key) from error
