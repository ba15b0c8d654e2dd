"""Chat templates by name: `chatml`, a file, or one of those that TRL ships (`trl/chat_templates`; TRL is not imported).

TRL has the templates of many models, and for most of them a training version: it writes every turn the same way
whatever follows, also the reasoning of earlier answers, and marks the assistant's words with `{% generation %}`.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tunebook.config.book import BOOK_PREFIX, CHATML_TEMPLATE, LIBRARY_PREFIX, TRAINING_TEMPLATE, resolve_path
from tunebook.errors import RequestError, did_you_mean

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_CHATML_FILE = f"{BOOK_PREFIX}recipes/quickstart/model/chat_template.jinja"
_TRAINING_SUFFIX = "_training"
GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def read_chat_template(text: str, own: str | None = None) -> str:
    """The template that `model.chat_template` names; `own` is the tokenizer's, which `training` replaces.

    Raises: RequestError if there is none of that name.
    """
    if text == TRAINING_TEMPLATE:
        return _training_version(own)
    if text.startswith(LIBRARY_PREFIX):
        return _from_library(text)
    path = resolve_path(_CHATML_FILE if text == CHATML_TEMPLATE else text)
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


def template_identity(text: str) -> str:
    """What decides the text of a named template, besides the tokenizer's own: the text itself, or TRL's version."""
    return f"{text}, trl {version('trl')}" if text == TRAINING_TEMPLATE else read_chat_template(text)


def library_templates() -> dict[str, Path]:
    """TRL's templates by name."""
    found = find_spec("trl")
    folders = found.submodule_search_locations if found is not None else None
    folder = Path(next(iter(folders))) / "chat_templates" if folders else None
    return {} if folder is None else {file.stem: file for file in sorted(folder.glob("*.jinja"))}


def _from_library(text: str) -> str:
    name, files = text.removeprefix(LIBRARY_PREFIX), library_templates()
    if name not in files:
        raise RequestError(
            f"model.chat_template={text}: TRL {version('trl')} has no template '{name}'."
            f"{did_you_mean(name, files)} It has: {', '.join(files)}",
            problem_id="chat-template-not-found",
        )
    return files[name].read_text(encoding="utf-8")


def _training_version(own: str | None) -> str:
    files = library_templates()
    trained = {name.removesuffix(_TRAINING_SUFFIX): file for name, file in files.items() if _TRAINING_SUFFIX in name}
    for name, file in files.items():
        if own is not None and file.read_text(encoding="utf-8").strip() == own.strip():
            if name in trained:
                return trained[name].read_text(encoding="utf-8")
            if GENERATION_MARKER.search(own):  # it has them itself
                return own
    raise RequestError(
        f"model.chat_template={TRAINING_TEMPLATE}: TRL {version('trl')} has no training version of this tokenizer's "
        f"template, which it compares letter by letter. It has versions for: {', '.join(trained)}; name one whose "
        f"control tokens the tokenizer has, such as model.chat_template=trl:qwen3_training, or a file of your own",
        problem_id="chat-template-not-found",
    )
