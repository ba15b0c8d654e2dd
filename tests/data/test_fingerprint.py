from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tunebook.config import schema
from tunebook.config.choices import Format, Overlong, Source, SpecialText, TrainOn
from tunebook.data.fingerprint import fingerprint, made_from, needs_tokenizer, vocabulary
from tunebook.errors import RequestError

Configs = Callable[..., schema.RunConfig]
TALK = [[("user", "Hi"), ("assistant", "Yo")]]


def mark(config: schema.RunConfig) -> str:
    return fingerprint(made_from(config))


def test_what_changes_no_token_changes_no_fingerprint(run_config: Configs) -> None:
    first = mark(run_config(TALK))
    assert mark(run_config(TALK, num_workers=3, mean_tokens=7.0, num_documents=9)) == first


@pytest.mark.parametrize(
    "change",
    [
        {"train_on": TrainOn.everything},
        {"overlong": Overlong.split},
        {"max_length": 65},
        {"system_prompt": "Be brief."},
        {"validation_share": 0.1},
        {"max_documents": 1},
        {"ignore_keys": ["name"]},
        {"special_tokens_in_content": SpecialText.keep},
    ],
)
def test_settings_change_the_fingerprint(run_config: Configs, change: dict[str, object]) -> None:
    assert mark(run_config(TALK, **change)) != mark(run_config(TALK))


def test_documents_change_the_fingerprint(run_config: Configs) -> None:
    assert mark(run_config(TALK)) != mark(run_config([[("user", "Hi"), ("assistant", "Yu")]]))


def test_template_and_tokenizer_change_the_fingerprint(run_config: Configs, tmp_path: Path) -> None:
    config = run_config(TALK)
    marks = {mark(config)}
    (tmp_path / "other.jinja").write_text("{{ messages }}")
    marks.add(mark(replace(config, model=replace(config.model, chat_template=str(tmp_path / "other.jinja")))))
    (tmp_path / "other.jinja").write_text("{{ messages }} ")
    marks.add(mark(replace(config, model=replace(config.model, chat_template=str(tmp_path / "other.jinja")))))
    marks.add(mark(replace(config, model=replace(config.model, eos_token="</s>"))))
    marks.add(mark(replace(config, model=replace(config.model, template_date="2031-12-01"))))
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    marks.add(mark(config))
    tokenizer = tmp_path / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    marks.add(mark(config))
    assert len(marks) == 7


def test_the_rest_of_the_model_does_not_matter(run_config: Configs, tmp_path: Path) -> None:
    config, file = run_config(TALK), tmp_path / "model" / "config.json"
    marks = set()
    for hidden_size, dtype in ((8, "float32"), (16, "bfloat16")):
        sizes = {"hidden_size": hidden_size, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True}
        file.write_text(json.dumps({"model_type": "qwen2", "dtype": dtype, "vocab_size": 300, **sizes}))
        marks.add(mark(config))
    assert len(marks) == 1


def test_documents_that_are_tokens_need_no_tokenizer() -> None:
    assert needs_tokenizer(schema.DatasetConfig())
    assert not needs_tokenizer(schema.DatasetConfig(source=Source.synthetic))
    assert not needs_tokenizer(schema.DatasetConfig(format=Format.pretokenized))
    parts = {"a": schema.MixturePart(source=Source.synthetic), "b": schema.MixturePart()}
    assert needs_tokenizer(schema.DatasetConfig(source=Source.mixture, parts=parts))


def test_synthetic_documents_need_a_vocabulary(run_config: Configs, tmp_path: Path) -> None:
    config = run_config(TALK)
    synthetic = replace(config, dataset=schema.DatasetConfig(source=Source.synthetic))
    with pytest.raises(RequestError, match=r"vocabulary, whose size is not known.*model\.path=DIR"):
        vocabulary(synthetic)
    facts = schema.ModelFacts(
        architecture="Qwen2ForCausalLM", num_parameters=1, num_layers=1, hidden_size=8, intermediate_size=8,
        num_attention_heads=1, num_key_value_heads=1, vocab_size=100, max_position_embeddings=64,
        tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    assert vocabulary(replace(synthetic, model=replace(config.model, facts=facts))) == (100, 99)
    assert vocabulary(replace(config, model=replace(config.model, facts=facts))) == (100, None)
