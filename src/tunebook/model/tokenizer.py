"""Load a model's tokenizer, and refuse one that would silently break training or generation.

Checked are an end-of-text token (without one a model never learns to stop), a padding token if rows are padded, and
special tokens that are missing in the vocabulary. No token is added, since a model has no embeddings for it, except for
`model.chat_template=chatml` (see `model.load.fit_embeddings`).
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.book import CHATML_TEMPLATE
from tunebook.config.choices import PackingMode, Source, Weights
from tunebook.config.override_text import typed
from tunebook.config.schema import ModelConfig, RunConfig
from tunebook.errors import RequestError, did_you_mean, first_line
from tunebook.files import sha256_text
from tunebook.model.tokenizer_files import (
    CHATML_TOKENS,
    PROCESSOR_TEMPLATE_FILE,
    read_chat_template,
    read_json_file,
    tokenizer_folder,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def needs_padding(config: RunConfig) -> bool:
    """True if this run pads: rows of one document each, or answers generated in batches. Isolated packing does not."""
    return config.packing.mode is not PackingMode.isolated or bool(config.evaluation.tasks)


def load_tokenizer(model: ModelConfig, *, is_padded: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer of a model with its overrides, checked; it never truncates or pads by itself.

    A missing chat template is allowed here: plain text needs none (see `data.template.require_template`).
    Raises: RequestError for a tokenizer that cannot be loaded, has no EOS, or no padding token if `is_padded`.
    """
    from tokenizers import AddedToken

    folder = tokenizer_folder(model)
    tokenizer = _load(folder, trust_remote_code=model.trust_remote_code)
    if not tokenizer.is_fast:
        raise RequestError(
            f"{folder}: this tokenizer exists only in Python, which cannot say which characters a token came from, so "
            "the assistant's tokens cannot be found; name one with a tokenizer.json: model.tokenizer=DIR",
            problem_id="tokenizer-not-fast",
        )
    # A tokenizer.json may have been saved with these on. training.max_length truncates documents and counts that.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    vocabulary = _stored_vocabulary(tokenizer, folder)
    if model.eos_token is not None:
        tokenizer.eos_token = _known_token("model.eos_token", model.eos_token, vocabulary)
    if model.pad_token is not None:
        tokenizer.pad_token = _known_token("model.pad_token", model.pad_token, vocabulary)
    if model.chat_template is not None:
        current = tokenizer.chat_template
        tokenizer.chat_template = read_chat_template(
            model.chat_template, current.get("default") if isinstance(current, dict) else current
        )
        if model.chat_template == CHATML_TEMPLATE:
            added = [token for token in CHATML_TOKENS if token not in vocabulary]
            tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added], special_tokens=True)
            vocabulary.update(added)
        if model.eos_token is None:
            _end_turns_as_written(tokenizer)
    fix_template_date(tokenizer, model.template_date)
    if tokenizer.eos_token is None:
        raise RequestError(
            f"{folder}: the tokenizer has no EOS token, so the model could never learn to stop; set model.eos_token to "
            "the token that ends a text or a turn",
            problem_id="tokenizer-no-eos",
        )
    _known_token(f"{folder}: the tokenizer's own eos_token", tokenizer.eos_token, vocabulary)
    if is_padded and tokenizer.pad_token not in vocabulary:  # the user chooses, since it is saved with the model
        token = tokenizer.pad_token
        wrong = f"padding token {token!r} is not in the vocabulary" if token else "tokenizer has no padding token"
        raise RequestError(
            f"{folder}: the {wrong}, and padded rows or batched generation need one; set model.pad_token to one that "
            f"texts do not contain, or to {typed('model.pad_token', tokenizer.eos_token)}. Padding is masked by length "
            "here, so the choice never hides an EOS from the loss",
            problem_id="tokenizer-no-pad",
        )
    return tokenizer


def added_token_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that `load_tokenizer` has added to the model's vocabulary."""
    if model.chat_template != CHATML_TEMPLATE:
        return []
    stored = _stored_vocabulary(tokenizer, tokenizer_folder(model))
    return [tokenizer.vocab[token] for token in CHATML_TOKENS if token not in stored]


def _end_turns_as_written(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the token that a named chat template ends turns with the EOS, unless generation ends there already."""
    talk = [{"role": "user", "content": "zqquestion"}, {"role": "assistant", "content": "zqanswer"}]
    try:
        text = str(tokenizer.apply_chat_template(talk, tokenize=False))
    except Exception:  # templates raise anything, from their own messages to TypeError; reported where one is used
        return
    after = text.rpartition("zqanswer")[2]
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    end = min((token for token in special if token in after), key=after.index, default=None)
    if end is not None and tokenizer.convert_tokens_to_ids(end) not in stop_token_ids(tokenizer):
        tokenizer.eos_token = end


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the chat template writes today's date."""
    return any("strftime_now" in template for template in _templates(tokenizer))


def fix_template_date(tokenizer: PreTrainedTokenizerBase, template_date: str) -> None:
    """Make the chat template write `template_date` (YYYY-MM-DD, midnight) as today's date, in this process.

    transformers gives a compiled template its own clock, which no argument changes, and caches compiled templates. The
    clock is replaced there, also for other users of the template such as lm-evaluation-harness.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    day = datetime.fromisoformat(template_date)
    for template in _templates(tokenizer):
        if "strftime_now" in template:
            with suppress(TemplateSyntaxError):  # reported where the template is used
                _compile_jinja_template(template).globals["strftime_now"] = day.strftime


def _templates(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of its chat templates."""
    templates: str | dict[str, str] | None = tokenizer.chat_template
    return [] if templates is None else [templates] if isinstance(templates, str) else list(templates.values())


def has_padding_token(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if a loaded tokenizer has a padding token in its vocabulary."""
    return tokenizer.pad_token in _stored_vocabulary(tokenizer, Path(tokenizer.name_or_path))


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the loaded tokenizer: its backend and its special tokens, without its chat template."""
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    backend: str = tokenizer.backend_tokenizer.to_str()
    return sha256_text(f"{backend}{json.dumps(special, sort_keys=True)}")


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end generation: the tokenizer's EOS and those of the model's generation_config.json.

    Llama 3 Instruct, for example, ends a text with one token and a turn with another.
    """
    file = Path(tokenizer.name_or_path) / "generation_config.json"
    stops = read_json_file(file).get("eos_token_id") if file.is_file() else None
    tokens = (tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops]))
    return frozenset(token for token in tokens if isinstance(token, int))


def _load(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # a broken file raises JSON, Rust or Python errors
        raise RequestError(
            f"{folder}: the tokenizer cannot be loaded ({first_line(error)}); if a file is broken or cut off, copy it "
            "again; if it has Python code, read that, then type model.trust_remote_code=true; or name another "
            "tokenizer with model.tokenizer=DIR",
            problem_id="tokenizer-broken",
        ) from error
    file = folder / PROCESSOR_TEMPLATE_FILE
    if tokenizer.chat_template is None and file.is_file():
        tokenizer.chat_template = read_json_file(file).get("chat_template")
    return tokenizer


def _stored_vocabulary(tokenizer: PreTrainedTokenizerBase, folder: Path) -> set[str]:
    """The tokens that the model has embeddings for.

    transformers silently adds the special tokens of its settings to the loaded vocabulary, so the vocabulary is read
    from the file, except for tokenizers without a tokenizer.json.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    return set(Tokenizer.from_file(str(file)).get_vocab() if file.is_file() else tokenizer.get_vocab())


def _known_token(key: str, token: str, vocabulary: set[str]) -> str:
    """The token. Raises: RequestError with near spellings when it is not in the vocabulary."""
    if token in vocabulary:
        return token
    raise RequestError(
        f"{key}={token!r} is not in the vocabulary, and the model has no weights for a new token; name one of the "
        f"tokenizer's.{did_you_mean(token, vocabulary)}",
        problem_id="token-not-in-vocabulary",
    )


def trainer_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer; for generated documents where none is at hand, one that only names the ids."""
    try:
        return load_tokenizer(config.model, is_padded=needs_padding(config))
    except RequestError as error:
        facts = config.model.facts
        is_missing = error.problem_id == "hub-out-of-reach" or (
            error.problem_id == "tokenizer-not-found" and config.model.tokenizer is None
        )
        is_for_show = config.dataset.source is Source.synthetic and config.model.weights is Weights.random
        if not (is_for_show and is_missing) or facts is None:
            raise
        return ids_only(facts.vocab_size)


def stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end an answer: those that end a trained turn, and those of the model's generation config."""
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    return sorted({*stop_token_ids(tokenizer), *stops})


def agree_on_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make generation stop at the token that training ends answers with, and at those that it stopped at before.

    Also corrects contradictory generation settings, which transformers refuses to write. Raises: RequestError for
    those that it cannot correct.
    """
    settings = model.generation_config
    settings.eos_token_id = stop_ids(model, tokenizer)
    settings.pad_token_id = tokenizer.pad_token_id
    model.config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    try:
        settings.validate(strict=True)
    except ValueError:  # a temperature of 0 is a server's way to write greedy decoding
        settings.update(**({"temperature": None} if settings.temperature == 0.0 else {"do_sample": True}))
    try:
        settings.validate(strict=True)
    except ValueError as error:
        raise RequestError(
            f"the model's generation settings are contradictory ({first_line(error)}), so the trained model could not "
            "be written; correct generation_config.json in a copy of the model, named by model=FOLDER",
            problem_id="model-cannot-be-saved",
        ) from error


def ids_only(vocab_size: int) -> PreTrainedTokenizerBase:
    """A tokenizer whose words are the ids; the last id ends a document, as in `data.synthetic`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokens = {f"<{number}>": number for number in range(vocab_size)}
    last = f"<{vocab_size - 1}>"
    backend = Tokenizer(WordLevel(tokens, unk_token="<0>"))
    make: Any = PreTrainedTokenizerFast  # untyped upstream
    tokenizer: PreTrainedTokenizerBase = make(tokenizer_object=backend, eos_token=last, pad_token=last)
    return tokenizer
