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
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tunebook.config.book import CHATML_TEMPLATE
from tunebook.config.choices import PackingMode, Source, Weights
from tunebook.config.override_text import typed
from tunebook.config.schema import ModelConfig, RunConfig
from tunebook.errors import RequestError, did_you_mean, first_few, first_line
from tunebook.files import sha256_text
from tunebook.model.chat_templates import CHATML_TOKENS, read_chat_template
from tunebook.model.tokenizer_files import tokenizer_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NUM_LISTED = 10  # special tokens in a message


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
    vocabulary = _Vocabulary(tokenizer, folder)
    if model.eos_token is not None:
        tokenizer.eos_token = vocabulary.require("model.eos_token", model.eos_token)
    if model.pad_token is not None:
        tokenizer.pad_token = vocabulary.require("model.pad_token", model.pad_token)
    if model.chat_template is not None:
        own = tokenizer.chat_template
        tokenizer.chat_template = read_chat_template(
            model.chat_template, own.get("default") if isinstance(own, dict) else own
        )
        if model.chat_template == CHATML_TEMPLATE:
            added = [token for token in CHATML_TOKENS if token not in vocabulary.tokens]
            tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added], special_tokens=True)
            vocabulary.tokens.update(added)
        if model.eos_token is None:
            _end_turns_as_written(tokenizer)
    fix_template_date(tokenizer, model.template_date)
    if tokenizer.eos_token is None:
        raise RequestError(
            f"{folder}: the tokenizer has no EOS token, so the model could never learn to stop; set model.eos_token to "
            f"the token that ends a text or a turn. {vocabulary.listed}",
            problem_id="tokenizer-no-eos",
        )
    vocabulary.require(f"{folder}: the tokenizer's own eos_token", tokenizer.eos_token)
    if is_padded:
        _check_padding(tokenizer, vocabulary, folder)
    return tokenizer


def added_token_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that `load_tokenizer` has added to the model's vocabulary."""
    if model.chat_template != CHATML_TEMPLATE:
        return []
    known = _Vocabulary(tokenizer, tokenizer_folder(model)).tokens
    return [tokenizer.vocab[token] for token in CHATML_TOKENS if token not in known]


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
    vocabulary = _Vocabulary(tokenizer, Path(tokenizer.name_or_path))
    return tokenizer.pad_token is not None and tokenizer.pad_token in vocabulary.tokens


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
    named: object = None
    if file.is_file():
        try:
            named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except ValueError as error:
            raise RequestError(f"{file} is not JSON: {error}; copy it again", problem_id="tokenizer-broken") from error
    more = named if isinstance(named, list) else [named]
    stops = (tokenizer.eos_token_id, *more)
    return frozenset(token for token in stops if isinstance(token, int))


def _load(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # a broken file raises JSON, Rust or Python errors
        reason = str(error).strip() or type(error).__name__
        if "trust_remote_code" in reason:
            raise RequestError(
                f"{folder}: this tokenizer runs Python code from its repository, which is refused unless you trust it; "
                "read the code, then type model.trust_remote_code=true",
                problem_id="remote-code-refused",
            ) from error
        raise RequestError(
            f"{folder}: the tokenizer cannot be loaded ({reason.splitlines()[0]}); a file may be broken or cut off: "
            "copy it again, or name another tokenizer with model.tokenizer=DIR",
            problem_id="tokenizer-broken",
        ) from error
    return tokenizer


class _Vocabulary:
    """The tokens that the model has embeddings for.

    transformers silently adds the special tokens of its settings to the loaded vocabulary, so the vocabulary is read
    from the file, except for tokenizers without a tokenizer.json.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        if content is None:
            self.special = [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items())]
            self.tokens = set(tokenizer.get_vocab())
            return
        self.special = [token["content"] for token in sorted(content["added_tokens"], key=lambda token: token["id"])]
        words = content["model"]["vocab"]
        # A Unigram model lists its words with their scores.
        self.tokens = {*(words if isinstance(words, dict) else (word for word, _ in words)), *self.special}

    def require(self, key: str, token: str) -> str:
        """The token. Raises: RequestError with near spellings when it is not in the vocabulary."""
        if token in self.tokens:
            return token
        guess = did_you_mean(token, self.special) or did_you_mean(token, self.tokens)
        raise RequestError(
            f"{key}={token!r} is not in the vocabulary, and the model has no weights for a new token.{guess} "
            f"{self.listed}",
            problem_id="token-not-in-vocabulary",
        )

    @property
    def listed(self) -> str:
        """The first special tokens, for messages."""
        return f"Special tokens there are: {first_few(self.special, _NUM_LISTED) or 'none'}"


def _check_padding(tokenizer: PreTrainedTokenizerBase, vocabulary: _Vocabulary, folder: Path) -> None:
    """Refuse instead of using EOS: the padding token is saved with the model, so the user should choose it."""
    own = tokenizer.pad_token
    if own is not None and own in vocabulary.tokens:
        return
    wrong = f"padding token {own!r} is not in the vocabulary" if own else "tokenizer has no padding token"
    raise RequestError(
        f"{folder}: the {wrong}, and padded rows or batched generation need one; set model.pad_token to one that texts "
        f"do not contain, or to {typed('model.pad_token', tokenizer.eos_token)}. Padding is masked by length here, so "
        f"the choice never hides an EOS from the loss. {vocabulary.listed}",
        problem_id="tokenizer-no-pad",
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
    named = model.generation_config.eos_token_id
    known = named if isinstance(named, list) else [] if named is None else [named]
    return sorted({*stop_token_ids(tokenizer), *known})


def agree_on_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Generation must stop at the token that training ends answers with, and at those that it stopped at before.

    Returns a note if the generation settings were corrected: transformers refuses to write contradictory ones.
    """
    settings = model.generation_config
    settings.eos_token_id = stop_ids(model, tokenizer)
    settings.pad_token_id = tokenizer.pad_token_id
    model.config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    try:
        settings.validate(strict=True)
    except ValueError:
        is_greedy = settings.temperature == 0.0  # in words of servers, but an error in transformers
        changed = "temperature=null" if is_greedy else "do_sample=true"
        settings.update(**({"temperature": None} if is_greedy else {"do_sample": True}))
        return f"note: the base model's generation_config.json contradicts itself; the trained model's has {changed}"
    return None


def rehearse_saving(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the settings and the tokenizer of a trained model to a scratch folder, before the training.

    Raises: RequestError if the library refuses to write what it has read.
    """
    try:
        with TemporaryDirectory() as folder:
            for part in (model.config, model.generation_config, tokenizer):
                part.save_pretrained(folder)
    except Exception as error:  # whatever a library raises for settings that it has read
        raise RequestError(
            f"the files of the trained model could not be written at the end ({first_line(error)}): its configuration, "
            "generation settings or tokenizer are wrong; correct them in a copy of the model, named by model.path=DIR",
            problem_id="model-cannot-be-saved",
        ) from error


def ids_only(vocab_size: int) -> PreTrainedTokenizerBase:
    """A tokenizer whose words are the ids; the last id ends a document, as in `data.synthetic`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"<{number}>": number for number in range(vocab_size)}
    last = f"<{vocab_size - 1}>"
    backend = Tokenizer(WordLevel(words, unk_token="<0>"))
    make: Any = PreTrainedTokenizerFast  # untyped upstream
    tokenizer: PreTrainedTokenizerBase = make(tokenizer_object=backend, eos_token=last, pad_token=last)
    return tokenizer
