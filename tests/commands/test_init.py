"""`tunebook init`: the written recipe composes and plans, and wrong answers are refused before a file is made."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.commands.init import data_choice, init_command, model_choice
from tunebook.commands.plan import plan_command
from tunebook.config.compose import compose
from tunebook.errors import RequestError, TunebookError
from tunebook.hardware.detect import Machine
from tunebook.plan import draft


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one file of conversations, on a machine with two cores and 8 GiB."""
    turns = [{"role": "user", "content": "leaf"}, {"role": "assistant", "content": "horse"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    monkeypatch.chdir(tmp_path)
    machine = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
    monkeypatch.setattr(draft, "detect_machine", lambda: machine)
    return tmp_path


def init(name: str, *recipes_dirs: Path, **flags: str) -> str:
    console = Console(file=io.StringIO(), width=160)
    init_command(name, [*recipes_dirs], console, **flags)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plan(name: str) -> str:
    console = Console(file=io.StringIO(), width=160)
    assert plan_command(name, [], [Path("my_recipes")], console) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_written_recipe_is_planned() -> None:
    printed = init("mine", model="smollm2_135m", data="chats.jsonl", parallelism="single")
    assert "  tunebook plan mine --recipes-dir my_recipes\n" in printed
    assert "one optimizer step: 64 documents" in plan("mine")
    config = compose("mine", [], [Path("my_recipes")]).config
    assert (config.title, config.dataset.path) == ("smollm2_135m on chats.jsonl", "chats.jsonl")
    assert config.parallelism.strategy.name == "single"


def test_a_recipe_on_another_keeps_what_is_not_typed() -> None:
    init("mine", base="quickstart", data="chats.jsonl")
    text = Path("my_recipes/mine.yaml").read_text()
    assert "- quickstart\n- override /dataset: jsonl\n- _self_\n" in text
    assert "global_samples" not in text
    config = compose("mine", [], [Path("my_recipes")]).config
    assert (config.training.global_samples, config.dataset.path) == (16, "chats.jsonl")
    plan("mine")


@pytest.mark.parametrize("name", ['it\'s "new": #1 \\ {a}.jsonl', "- a, b.jsonl"])
def test_any_file_name_is_read_back_as_it_was_typed(name: str) -> None:
    Path("chats.jsonl").rename(name)
    init("mine", model="quickstart", data=name)
    config = compose("mine", [], [Path("my_recipes")]).config
    assert (config.dataset.path, config.title) == (name, f"quickstart on {name}")


def test_models_and_data_sets_are_told_apart(work: Path) -> None:
    (work / "model").mkdir()
    assert model_choice("model") == ("hub", {"path": "model"})
    assert model_choice("qwen25_3b") == ("qwen25_3b", {})
    assert model_choice("Qwen/Qwen2.5-0.5B") == ("hub", {"name": "Qwen/Qwen2.5-0.5B"})
    assert data_choice("boolq") == ("boolq", {})
    assert data_choice("google/boolq") == ("hub", {"name": "google/boolq"})
    assert data_choice("ch*.jsonl") == ("jsonl", {"path": "ch*.jsonl"})


@pytest.mark.parametrize(
    ("name", "flags", "id"),
    [
        ("mine", {}, "init-incomplete"),
        ("mine", {"model": "qwen25_05", "data": "boolq"}, "init-model"),
        ("mine", {"model": "quickstart", "data": "boolk"}, "init-data"),
        ("mine", {"model": "quickstart", "data": "chat.jsonl"}, "data-file-not-found"),
        ("mine", {"base": "quickstart", "parallelism": "zero33"}, "unknown-choice"),
        ("mine", {"base": "quickstrat"}, "unknown-recipe"),
        ("mine", {"base": "broken"}, "unknown-key"),
        ("own/mine", {"base": "quickstart"}, "recipe-name-form"),
        ("quickstart", {"base": "quickstart"}, "recipe-name-taken"),
    ],
)
def test_what_cannot_be_used_is_refused_and_no_recipe_is_written(
    work: Path, name: str, flags: dict[str, str], id: str
) -> None:
    (work / "own").mkdir()
    broken = "# @package _global_\ndefaults:\n  - quickstart\n  - _self_\ntraining:\n  sead: 1\n"
    (work / "own" / "broken.yaml").write_text(broken)
    with pytest.raises(TunebookError) as raised:
        init(name, work / "own", **flags)
    assert raised.value.problem_id == id
    assert sorted(path.name for path in work.rglob("*") if path.is_file()) == ["broken.yaml", "chats.jsonl"]


def test_a_recipe_is_written_where_it_is_found_and_not_replaced(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "shared").mkdir()
    monkeypatch.setenv("TUNEBOOK_RECIPES", f"{work / 'shared'}:{work}")
    init("mine", base="quickstart")
    before = (work / "shared" / "mine.yaml").read_text()
    with pytest.raises(RequestError) as raised:
        init("mine", base="quickstart", parallelism="ddp")
    assert raised.value.problem_id == "recipe-exists"
    assert (work / "shared" / "mine.yaml").read_text() == before
    assert compose("mine", [], []).config.title == "Built on quickstart"  # found by the variable alone
    init("other", Path("new"), base="mine")
    assert Path("new/other.yaml").is_file()
