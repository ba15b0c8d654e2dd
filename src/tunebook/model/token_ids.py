"""Which tokens a trained model begins, ends and pads with, and a stand-in tokenizer for generated documents.

Documents that were generated as token ids are never tokenised, but the trainer wants a tokenizer all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebook.config.choices import Source, Weights
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.model.tokenizer import load_tokenizer, needs_padding, stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def agree_on_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Generation must stop at the token that training ends answers with, and at those that it stopped at before."""
    model.config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = sorted(stop_token_ids(tokenizer))
    model.generation_config.pad_token_id = tokenizer.pad_token_id


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
