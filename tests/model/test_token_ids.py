"""The stand-in for a tokenizer that generated documents do not need."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tunebook.config.choices import Source, Weights
from tunebook.config.compose import compose
from tunebook.errors import RequestError
from tunebook.model.token_ids import trainer_tokenizer


@pytest.fixture
def generated(tmp_path):
    """Generated documents for a model of random weights in a folder that holds a config.json and no tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    config = compose("qwen05b_single", []).config
    config.model.name, config.model.path, config.model.weights = None, str(tmp_path), Weights.random
    config.model.tokenizer = config.model.chat_template = None
    config.dataset.source = Source.synthetic
    config.model.facts = replace(config.model.facts, vocab_size=50)
    return config


def test_words_are_the_ids_and_the_last_ends_a_document(generated):
    tokenizer = trainer_tokenizer(generated)
    assert len(tokenizer) == 50
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 49
    assert tokenizer.decode([7]) == "<7>"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "weights", Weights.pretrained),  # a trained model is not given another vocabulary
        ("dataset", "source", Source.files),
    ],
)
def test_nobody_elses_tokenizer_is_replaced(generated, section, key, value):
    setattr(getattr(generated, section), key, value)
    with pytest.raises(RequestError, match="holds no tokenizer"):
        trainer_tokenizer(generated)


def test_a_tokenizer_that_is_named_has_to_be_there(generated, tmp_path):
    (tmp_path / "other").mkdir()
    generated.model.tokenizer = str(tmp_path / "other")
    with pytest.raises(RequestError, match=r"model\.tokenizer"):
        trainer_tokenizer(generated)
