"""One hash over everything that could change a prepared token, found without reading documents or loading a tokenizer.

Asked on every start, so nothing here imports torch, transformers or datasets.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tunebook.config.choices import Format, Source
from tunebook.config.schema import DatasetConfig, DatasetSource, RunConfig
from tunebook.data.sources import corpus_identity
from tunebook.errors import RequestError
from tunebook.files import sha256_file
from tunebook.model.base_config import read_vocab_size
from tunebook.model.tokenizer_files import tokenizer_files_hash

# Modules of this package that only read what is prepared; a change in any other makes everything be prepared again.
_READERS = ("view.py", "content_hash.py", "packing.py", "sampler.py", "rows.py", "prepared.py")
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "datasets")


def needs_tokenizer(dataset: DatasetConfig) -> bool:
    """Whether documents are to be tokenised; false only where the configuration says that they are tokens already."""
    sources: list[DatasetSource] = list(dataset.parts.values()) if dataset.source is Source.mixture else [dataset]
    return not all(source.source is Source.synthetic or source.format is Format.pretokenized for source in sources)


def vocabulary(config: RunConfig) -> tuple[int | None, int | None]:
    """The model's vocabulary size and, for generated documents, the token that ends them: both None where unknown.

    Generated documents end with the vocabulary's last token, not the tokenizer's EOS: they are made for machines
    without a hub, and so must not depend on having a tokenizer. Raises: RequestError when they have no vocabulary.
    """
    vocab_size = read_vocab_size(config.model)
    sources: list[DatasetSource] = [config.dataset, *config.dataset.parts.values()]
    is_synthetic = any(source.source is Source.synthetic for source in sources)
    if vocab_size is not None:
        return vocab_size, vocab_size - 1 if is_synthetic else None
    if is_synthetic:
        raise RequestError(
            "dataset=synthetic draws tokens from the model's vocabulary, whose size is not known here; choose a model "
            "group that has facts (such as model=qwen25_05b), or model.path=DIR with a config.json",
            problem_id="synthetic-without-vocabulary",
        )
    return None, None


def made_from(config: RunConfig) -> dict[str, Any]:
    """Everything that could change a prepared token, as plain JSON values.

    Raises: RequestError when data or tokenizer are not there, or a hub that is needed cannot be reached.
    """
    vocab_size, eos_token_id = vocabulary(config)
    return {
        "code": _code_hash(),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "corpus": corpus_identity(config.dataset, vocab_size=vocab_size, eos_token_id=eos_token_id),
        "tokenizer": tokenizer_files_hash(config.model) if needs_tokenizer(config.dataset) else None,
        "template_date": config.model.template_date,
        "train_on": config.dataset.train_on.name,
        "special_tokens_in_content": config.dataset.special_tokens_in_content.name,
        "overlong": config.dataset.overlong.name,
        "max_length": config.training.max_length,
    }


def fingerprint(content: dict[str, Any]) -> str:
    """The hash of `made_from`, as hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _code_hash() -> str:
    here = Path(__file__).parent
    files = [file for file in sorted(here.glob("*.py")) if file.name not in _READERS]
    files.append(here.parent / "model" / "tokenizer.py")
    return hashlib.sha256("".join(sha256_file(file) for file in files).encode()).hexdigest()
