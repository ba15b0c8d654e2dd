"""Tokenizers with which training or generation would silently be wrong, and their errors."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from tunebook.config import schema
from tunebook.config.choices import PackingMode, Source, Weights
from tunebook.config.compose import compose
from tunebook.errors import RequestError
from tunebook.model.tokenizer import (
    added_token_ids,
    agree_on_tokens,
    load_tokenizer,
    needs_padding,
    stop_token_ids,
    tokenizer_hash,
    trainer_tokenizer,
)
from tunebook.model.tokenizer_files import tokenizer_files_hash, tokenizer_folder


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


def drop(folder: Path, *keys: str) -> Path:
    """Remove settings of a tokenizer."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in settings.items() if key not in keys}))
    return folder


def load(folder: Path, **model: Any) -> Any:
    return load_tokenizer(schema.ModelConfig(path=str(folder), **model))


def test_tokenizer_neither_truncates_nor_pads(tmp_path: Path) -> None:
    tokenizer = load(make_folder(tmp_path / "model", has_padding=True))
    encodings = tokenizer.backend_tokenizer.encode_batch(["a b a b", "a"])
    assert [encoding.ids for encoding in encodings] == [[0, 1, 0, 1], [0]]


def test_overrides_are_applied(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own {{ messages }}")
    folder = make_folder(tmp_path / "model")
    tokenizer = load(folder, eos_token="<|im_end|>", pad_token="</s>", chat_template=str(tmp_path / "own.jinja"))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (5, 4)
    assert tokenizer.chat_template == "own {{ messages }}"


@pytest.mark.parametrize("key", ["eos_token", "pad_token"])
def test_an_override_outside_the_vocabulary_is_refused_with_the_nearest(tmp_path: Path, key: str) -> None:
    folder = make_folder(tmp_path / "model")
    with pytest.raises(
        RequestError, match=rf"model\.{key}='<\|imend\|>' is not in the vocabulary.*mean '<\|im_end\|>'"
    ):
        load(folder, **{key: "<|imend|>"})
    with pytest.raises(RequestError, match=r"mean '<\|odd\|>'"):  # no special token, but in the vocabulary
        load(folder, **{key: "<|ode|>"})


def test_no_eos_is_refused_with_what_to_set(tmp_path: Path) -> None:
    folder = drop(make_folder(tmp_path / "model"), "eos_token")
    with pytest.raises(
        RequestError, match=r"no EOS.*'model\.eos_token=\"<\|im_end\|>\"' or 'model\.eos_token=\"</s>\"'"
    ):
        load(folder)
    assert load(folder, eos_token="</s>").eos_token_id == 4


def test_no_padding_token_is_refused_with_free_tokens(tmp_path: Path) -> None:
    special = ("</s>", "<unk>", "<|reserved_1|>", "<|right_pad|>")
    folder = drop(make_folder(tmp_path / "model", special), "pad_token")
    message = r"no padding token.*token=\"<\|right_pad\|>\"' or .*<\|reserved_1\|>.* or .*<unk>.*never hides an EOS"
    with pytest.raises(RequestError, match=message):
        load(folder)
    assert load_tokenizer(schema.ModelConfig(path=str(folder)), is_padded=False).pad_token is None


def test_eos_pads_only_where_a_person_says_so(tmp_path: Path) -> None:
    folder = drop(make_folder(tmp_path / "model", ("</s>",)), "pad_token")
    with pytest.raises(RequestError, match=r"'model\.pad_token=\"</s>\"'"):
        load(folder)
    assert load(folder, pad_token="</s>").pad_token == "</s>"


def test_special_tokens_of_its_own_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    """transformers would add them to the vocabulary, after the model's last row."""
    with pytest.raises(RequestError, match=r"the tokenizer's own eos_token='<eos>' is not in the vocabulary"):
        load(make_folder(tmp_path / "model", eos_token="<eos>"))
    with pytest.raises(RequestError, match=r"padding token '<pad>' is not in the vocabulary.*model\.pad_token="):
        load(make_folder(tmp_path / "model", pad_token="<pad>"))


def test_missing_folder_or_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=rf"model\.path={tmp_path}/no: there is no folder {tmp_path}/no"):
        load(tmp_path / "no")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')  # from this alone transformers makes one token
    with pytest.raises(RequestError, match=r"holds no tokenizer \(none of tokenizer\.json"):
        load(tmp_path)
    with pytest.raises(RequestError, match=r"neither model\.name nor model\.path"):
        load_tokenizer(schema.ModelConfig())


def test_a_broken_file_is_said(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(RequestError, match=r"the tokenizer cannot be loaded \(.*model\.tokenizer=DIR"):
        load(folder)


def test_missing_chat_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"model\.chat_template=no\.jinja: /.*/no\.jinja cannot be read"):
        load(make_folder(tmp_path / "model"), chat_template="no.jinja")


def test_unreachable_hub_is_an_error_with_an_alternative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RequestError, match=r"hf download nobody/nothing.*HF_HUB_CACHE"):
        load_tokenizer(schema.ModelConfig(name="nobody/nothing"))


def test_another_tokenizer_can_be_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "other")
    assert tokenizer_folder(schema.ModelConfig(name="nobody/nothing", tokenizer=str(folder))) == folder
    with pytest.raises(RequestError, match=r"model\.tokenizer=\./no: there is no folder .*or a name on the hub"):
        tokenizer_folder(schema.ModelConfig(tokenizer="./no"))
    assert (tokenizer_folder(schema.ModelConfig(path="book:recipes/quickstart/model")) / "tokenizer.json").is_file()


def test_generation_stops_at_both_kinds_of_end(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    assert stop_token_ids(load(folder)) == {4}
    for written, expected in ((5, {4, 5}), ([5, 3], {3, 4, 5}), (None, {4})):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": written}))
        assert stop_token_ids(load(folder)) == expected


GEMMA = ("</s>", "<s>", "<end_of_turn>", "<start_of_turn>")


def test_a_named_template_ends_turns_with_its_own_token(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", GEMMA)
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
    ("written", "changed"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6}),
        ({"do_sample": False, "temperature": 0.0}, {"do_sample": False, "temperature": None}),
        ({"do_sample": True, "temperature": 0.6}, None),
        ({"do_sample": False, "top_k": 20, "early_stopping": True}, "generation-config-wrong"),
    ],
)
def test_generation_settings_that_cannot_be_written_are_corrected_or_refused(
    tmp_path: Path, written: dict[str, Any], changed: dict[str, Any] | str | None
) -> None:
    settings = GenerationConfig(**written, eos_token_id=[9, 3])
    model = SimpleNamespace(generation_config=settings, config=SimpleNamespace())
    tokenizer = load(make_folder(tmp_path / "model"))
    if isinstance(changed, str):
        with pytest.raises(RequestError) as error:
            agree_on_tokens(model, tokenizer)
        assert error.value.problem_id == changed
        return
    assert (agree_on_tokens(model, tokenizer) is None) == (changed is None)
    assert settings.eos_token_id == [3, 4, 9]
    assert {key: getattr(settings, key) for key in changed or {}} == (changed or {})
    settings.save_pretrained(tmp_path)


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    first = make_folder(tmp_path / "model")
    shutil.copytree(first, tmp_path / "copy")
    (tmp_path / "copy" / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_hash(load(first)) == tokenizer_hash(load(tmp_path / "copy"))
    assert tokenizer_hash(load(first)) != tokenizer_hash(load(first, eos_token="<|im_end|>"))
    other = make_folder(tmp_path / "other", ("<s>", "</s>", "<|im_end|>", "<more>"))
    assert tokenizer_hash(load(first)) != tokenizer_hash(load(other))


def test_the_hash_of_the_files_needs_no_loading(tmp_path: Path) -> None:
    first = make_folder(tmp_path / "model")
    shutil.copytree(first, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("no part of the tokenizer")
    hashes = [tokenizer_files_hash(schema.ModelConfig(path=str(tmp_path / name))) for name in ("model", "copy")]
    assert hashes[0] == hashes[1]
    assert tokenizer_files_hash(schema.ModelConfig(path=str(first), pad_token="</s>")) != hashes[0]


def test_padding_is_needed_by_rows_of_one_document_and_by_answers() -> None:
    config = schema.RunConfig(
        packing=schema.PackingConfig(mode=PackingMode.isolated), evaluation=schema.EvaluationConfig(tasks=[])
    )
    assert not needs_padding(config)
    config.evaluation.tasks = ["ifeval"]
    assert needs_padding(config)
    config.evaluation.tasks = []
    config.packing.mode = PackingMode.padded
    assert needs_padding(config)


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
def test_other_configurations_need_a_tokenizer(generated, section, key, value):
    setattr(getattr(generated, section), key, value)
    with pytest.raises(RequestError, match="holds no tokenizer"):
        trainer_tokenizer(generated)


def test_a_tokenizer_that_is_named_has_to_be_there(generated, tmp_path):
    (tmp_path / "other").mkdir()
    generated.model.tokenizer = str(tmp_path / "other")
    with pytest.raises(RequestError, match=r"model\.tokenizer"):
        trainer_tokenizer(generated)
