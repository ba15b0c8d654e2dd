"""Tokenizers with which training or generation would silently be wrong, and their errors."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedConfig

from tunebook.config import schema
from tunebook.config.choices import Source, Weights
from tunebook.config.frozen import plain_config
from tunebook.config.model_facts import ModelFacts
from tunebook.errors import RequestError
from tunebook.model.tokenizer import (
    added_token_ids,
    agree_on_tokens,
    load_tokenizer,
    stop_token_ids,
    tokenizer_hash,
    trainer_tokenizer,
)
from tunebook.model.tokenizer_files import tokenizer_files_hash


def make_folder(
    folder: Path,
    special: tuple[str, ...] = ("<s>", "</s>", "<|im_end|>"),
    *,
    has_padding: bool = False,
    **settings: str,
) -> Path:
    """A tokenizer of three words and some special tokens, which follow as tokens 3, 4, ..."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1, "<|odd|>": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.enable_truncation(2)
    if has_padding:
        tokenizer.enable_padding(length=5)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<s>"} | settings)
    )
    return folder


def load(folder: Path, **model: Any) -> Any:
    return load_tokenizer(schema.ModelConfig(path=str(folder), **model))


def test_overrides_are_applied_and_nothing_is_truncated_or_padded(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own {{ messages }}")
    folder = make_folder(tmp_path / "model", has_padding=True)
    tokenizer = load(folder, eos_token="<|im_end|>", pad_token="</s>", chat_template=str(tmp_path / "own.jinja"))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (5, 4)
    assert tokenizer.chat_template == "own {{ messages }}"
    encodings = tokenizer.backend_tokenizer.encode_batch(["a b a b", "a"])
    assert [encoding.ids for encoding in encodings] == [[0, 1, 0, 1], [0]]


@pytest.mark.parametrize(("key", "problem"), [("eos", "token-not-in-vocabulary"), ("pad", "tokenizer-no-pad")])
def test_special_tokens_that_do_not_exist_are_refused(tmp_path: Path, key: str, problem: str) -> None:
    """transformers would add the tokenizer's own to the vocabulary, after the model's last row."""
    with pytest.raises(RequestError, match=r"mean '<\|im_end\|>'") as caught:
        load(make_folder(tmp_path / "model"), **{f"{key}_token": "<|imend|>"})
    assert caught.value.problem_id == "token-not-in-vocabulary"
    with pytest.raises(RequestError) as caught:
        load(make_folder(tmp_path / "own", **{f"{key}_token": "<absent>"}))
    assert caught.value.problem_id == problem


@pytest.mark.parametrize("key", ["eos", "pad"])
def test_no_special_token_is_refused_where_one_is_needed(tmp_path: Path, key: str) -> None:
    folder = make_folder(tmp_path / "model", ("</s>", "<|reserved_1|>"), pad_token="<|reserved_1|>")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings[f"{key}_token"]
    file.write_text(json.dumps(settings))
    with pytest.raises(RequestError, match=rf"model\.{key}_token") as caught:
        load(folder)
    assert caught.value.problem_id == f"tokenizer-no-{key}"
    assert load(folder, **{f"{key}_token": "</s>"}).eos_token_id == 3  # EOS pads only where a person says so
    if key == "pad":
        assert load_tokenizer(schema.ModelConfig(path=str(folder)), is_padded=False).pad_token is None


def test_missing_folder_or_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')  # from this alone transformers makes one token
    for model, problem in (
        (schema.ModelConfig(path=str(tmp_path / "no")), "tokenizer-not-found"),
        (schema.ModelConfig(path=str(tmp_path)), "tokenizer-not-found"),
        (schema.ModelConfig(tokenizer="./no"), "tokenizer-not-found"),
        (schema.ModelConfig(), "model-not-named"),
        (schema.ModelConfig(name="nobody/nothing"), "hub-out-of-reach"),
        (schema.ModelConfig(tokenizer="nobody/nothing"), "hub-out-of-reach"),
    ):
        with pytest.raises(RequestError) as caught:
            load_tokenizer(model)
        assert caught.value.problem_id == problem


def test_code_of_a_tokenizer_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", tokenizer_class="OwnTokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | named))
    (folder / "own.py").write_text("raise SystemExit('ran')\n")
    broken = make_folder(tmp_path / "broken")
    (broken / "tokenizer.json").write_text('{"version": ')
    for refused in (folder, broken):
        with pytest.raises(RequestError, match=r"model\.trust_remote_code") as caught:
            load(refused)
        assert caught.value.problem_id == "tokenizer-broken"


def test_generation_stops_at_both_kinds_of_end(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    assert stop_token_ids(load(folder)) == {4}
    for written, expected in ((5, {4, 5}), ([5, 3], {3, 4, 5}), (None, {4})):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": written}))
        assert stop_token_ids(load(folder)) == expected


def test_a_named_template_ends_turns_with_its_own_token(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", ("</s>", "<s>", "<end_of_turn>", "<start_of_turn>"))
    assert load(folder, chat_template="trl:gemma3").eos_token == "<end_of_turn>"
    assert load(folder, chat_template="trl:gemma3", eos_token="</s>").eos_token == "</s>"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert load(folder, chat_template="trl:gemma3").eos_token == "</s>"  # generation ends at both already


def test_chatml_adds_the_tokens_that_are_not_there(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", ("<s>", "</s>"))
    model = schema.ModelConfig(path=str(folder), chat_template="chatml")
    tokenizer = load_tokenizer(model)
    assert (tokenizer.eos_token, added_token_ids(model, tokenizer)) == ("<|im_end|>", [5, 6])
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.apply_chat_template(talk, return_dict=False)[-2:] == [1, 6]
    has_both = schema.ModelConfig(
        path=str(make_folder(tmp_path / "other", ("<s>", "<|im_start|>", "<|im_end|>", "</s>"))), chat_template="chatml"
    )
    tokenizer = load_tokenizer(has_both)
    assert (tokenizer.eos_token, added_token_ids(has_both, tokenizer), len(tokenizer)) == ("<|im_end|>", [], 7)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6}),
        ({"do_sample": False, "temperature": 0.0}, {"do_sample": False, "temperature": None}),
        ({"do_sample": False, "top_k": 20, "early_stopping": True}, None),
    ],
)
def test_generation_settings_that_cannot_be_written_are_corrected_or_refused(
    tmp_path: Path, written: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    settings = GenerationConfig(**written, eos_token_id=[9, 3])
    model, tokenizer = (
        SimpleNamespace(generation_config=settings, config=PreTrainedConfig()),
        load(make_folder(tmp_path)),
    )
    if expected is None:
        with pytest.raises(RequestError) as caught:
            agree_on_tokens(model, tokenizer)
        assert caught.value.problem_id == "model-cannot-be-saved"
        return
    agree_on_tokens(model, tokenizer)
    assert settings.eos_token_id == [3, 4, 9]
    assert {key: getattr(settings, key) for key in expected} == expected
    settings.save_pretrained(tmp_path)


def test_hashes_are_of_the_content(tmp_path: Path) -> None:
    first, copy = make_folder(tmp_path / "model"), tmp_path / "copy"
    shutil.copytree(first, copy)
    (copy / "README.md").write_text("no part of the tokenizer")
    hashes = [tokenizer_files_hash(schema.ModelConfig(path=str(folder))) for folder in (first, copy)]
    assert hashes[0] == hashes[1]
    assert tokenizer_files_hash(schema.ModelConfig(path=str(first), pad_token="</s>")) != hashes[0]
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_hash(load(first)) == tokenizer_hash(load(copy))
    assert tokenizer_hash(load(first)) != tokenizer_hash(load(first, eos_token="<|im_end|>"))


def test_generated_documents_for_random_weights_need_no_tokenizer_and_others_do(tmp_path: Path) -> None:
    """The tokens are the ids, and the last ends a document."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    generated = plain_config(
        model=schema.ModelConfig(path=str(tmp_path), weights=Weights.random, facts=ModelFacts(vocab_size=50)),
        dataset=schema.DatasetConfig(source=Source.synthetic),
    )
    tokenizer = trainer_tokenizer(generated)
    assert len(tokenizer) == 50
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 49
    assert tokenizer.decode([7]) == "<7>"
    for other in (
        replace(generated, model=replace(generated.model, weights=Weights.pretrained)),  # keeps its own vocabulary
        replace(generated, model=replace(generated.model, tokenizer="/nowhere")),
        replace(generated, dataset=schema.DatasetConfig(source=Source.files)),
    ):
        with pytest.raises(RequestError) as caught:
            trainer_tokenizer(other)
        assert caught.value.problem_id == "tokenizer-not-found"
