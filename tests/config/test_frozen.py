"""Relative paths of a run that is read again from another folder."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from tunebook.config.book import placed, recipe_file, resolve_path
from tunebook.config.compose import compose
from tunebook.config.frozen import config_to_yaml, load_config, typed_in
from tunebook.config.identity import comparable_config, config_hash
from tunebook.config.schema import RunConfig

RELATIVE = ["model.path=m/base", "dataset.path='chats/*.jsonl'", "dataset.validation_path=held_out.jsonl",
            "model.chat_template=my.jinja", "model.tokenizer=m/words",
            "evaluation.tasks=[gsm8k,my.yaml]"]  # fmt: skip


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a tokenizer's folder, in which overrides are typed."""
    folder = tmp_path / "work"
    (folder / "m" / "words").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def composed(*words: str) -> RunConfig:
    return compose("quickstart", list(words)).config


def frozen(config: RunConfig, folder: Path) -> Path:
    (folder / "run.yaml").write_text(config_to_yaml(config))
    return folder / "run.yaml"


def test_a_run_finds_its_files_from_another_folder(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed(*RELATIVE)
    file = frozen(config, work)
    monkeypatch.chdir(tmp_path)
    read = load_config(file)
    model, dataset = read.model, read.dataset
    texts = [model.path, model.chat_template, model.tokenizer, dataset.path, dataset.validation_path]
    texts.append(read.evaluation.tasks[1])
    names = ["m/base", "my.jinja", "m/words", "chats/*.jsonl", "held_out.jsonl", "my.yaml"]
    assert [resolve_path(text) for text in texts if text is not None] == [work / name for name in names]
    assert resolve_path(read.evaluation.tasks[0]) == tmp_path / "gsm8k", "a name, and no file of that folder"
    assert typed_in(read) == work


def test_a_recipe_that_was_named_as_a_file_is_found_from_another_folder(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "own.yaml").write_text("# @package _global_\ndefaults: [quickstart, _self_]\n")
    file = frozen(compose("own.yaml", []).config, work)
    monkeypatch.chdir(tmp_path)
    read = load_config(file)
    assert read.recipe is not None
    assert recipe_file(read.recipe, []) == work / "own.yaml"
    assert typed_in(read) == work
    assert comparable_config(read)["recipe"] == "own"


def test_texts_and_hash_of_paths_do_not_change(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed(*RELATIVE)
    file = frozen(config, work)
    monkeypatch.chdir(tmp_path)
    read = load_config(file)
    assert read == config
    assert config_hash(read) == config_hash(config)
    assert config_to_yaml(read) == file.read_text(), "frozen again it names the same folder"


def test_parts_of_a_mixture_are_found_and_names_on_the_hub_are_none(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ["dataset=mixture", "dataset.parts.a.path=x.jsonl", "dataset.parts.b.source=hub"]
    file = frozen(composed(*parts, "dataset.parts.b.name=org/data"), work)
    monkeypatch.chdir(tmp_path)
    found = load_config(file).dataset.parts
    assert resolve_path(found["a"].path or "") == work / "x.jsonl"
    assert resolve_path(found["b"].name or "") == tmp_path / "org" / "data"


def test_a_placed_path_is_its_text_and_survives_copies(tmp_path: Path) -> None:
    path = placed("m/base", tmp_path)
    assert path == "m/base" and f"{path}" == "m/base"
    for other in (copy.deepcopy(path), pickle.loads(pickle.dumps(path))):
        assert resolve_path(other) == tmp_path / "m" / "base"
    assert resolve_path(placed("/m/base", tmp_path)) == Path("/m/base")
