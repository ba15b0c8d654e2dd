"""`tunebook init`: the written recipe composes and plans, and wrong answers are refused before a file is made."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.cli.options import split
from tunebook.commands.init import init_command
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


def init(*words: str, recipes_dirs: list[Path] | None = None) -> str:
    console = Console(file=io.StringIO(), width=160)
    init_command(words[0] if words else None, *split([*words[1:]], recipes_dirs), recipes_dirs or [], console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plan(name: str) -> str:
    console = Console(file=io.StringIO(), width=160)
    assert plan_command(name, [], [], console) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_written_recipe_is_planned_as_the_printed_command_says() -> None:
    assert "  tunebook plan mine\n" in init("mine", "chats.jsonl", "model=smollm2_135m", "training.num_epochs=2")
    assert "batch     64 documents a step" in plan("mine")
    config = compose("mine", []).config
    assert (config.title, config.dataset.path, config.training.num_epochs) == (
        "smollm2_135m on chats.jsonl", "chats.jsonl", 2,
    )  # fmt: skip


def test_a_recipe_on_another_keeps_what_is_not_typed() -> None:
    init("mine", "quickstart", "chats.jsonl")
    text = Path("my_recipes/mine.yaml").read_text()
    assert "- quickstart\n- override /dataset: file\n- _self_\n" in text
    config = compose("mine", []).config
    assert (config.training.global_samples, config.dataset.path) == (16, "chats.jsonl")
    plan("mine")


@pytest.mark.parametrize("key", ["name", "path", "run"])
def test_a_model_that_is_typed_by_its_key_is_the_title(key: str) -> None:
    init("mine", "chats.jsonl", f"model.{key}=one/model")
    assert compose("mine", []).config.title == "one/model on chats.jsonl"


@pytest.mark.parametrize("name", ['it\'s "new": #1 \\ {a}.jsonl', "- a, b.jsonl"])
def test_any_file_name_is_read_back_as_it_was_typed(name: str) -> None:
    Path("chats.jsonl").rename(name)
    init("mine", name, "model=quickstart")
    config = compose("mine", []).config
    assert (config.dataset.path, config.title) == (name, f"quickstart on {name}")


@pytest.mark.parametrize(
    ("words", "id"),
    [
        ((), "init-incomplete"),
        (("mine",), "init-incomplete"),
        (("mine", "chats.jsonl"), "init-incomplete"),
        (("mine", "model=quickstart"), "init-incomplete"),
        (("mine", "boolq", "model=qwen25_05"), "unknown-recipe"),
        (("mine", "chats.jsonl", "model=qwen25_05"), "unknown-choice"),
        (("mine", "chat.jsonl", "model=quickstart"), "data-file-not-found"),
        (("mine", "quickstart", "parallelism=zero33"), "unknown-choice"),
        (("mine", "quickstrat"), "unknown-recipe"),
        (("mine", "broken"), "unknown-key"),
        (("own/mine", "quickstart"), "recipe-name-form"),
        (("quickstart", "quickstart"), "recipe-name-taken"),
    ],
)
def test_what_cannot_be_used_is_refused_and_no_recipe_is_written(work: Path, words: tuple[str, ...], id: str) -> None:
    (work / "own").mkdir()
    broken = "# @package _global_\ndefaults:\n  - quickstart\n  - _self_\ntraining:\n  sead: 1\n"
    (work / "own" / "broken.yaml").write_text(broken)
    with pytest.raises(TunebookError) as raised:
        init(*words, recipes_dirs=[work / "own"])
    assert raised.value.problem_id == id
    assert sorted(path.name for path in work.rglob("*") if path.is_file()) == ["broken.yaml", "chats.jsonl"]


def test_a_recipe_is_written_where_it_is_found_and_not_replaced(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "shared").mkdir()
    monkeypatch.setenv("TUNEBOOK_RECIPES", f"{work / 'shared'}:{work}")
    init("mine", "quickstart")
    before = (work / "shared" / "mine.yaml").read_text()
    with pytest.raises(RequestError) as raised:
        init("mine", "quickstart", "parallelism=ddp")
    assert raised.value.problem_id == "recipe-exists"
    assert (work / "shared" / "mine.yaml").read_text() == before
    assert compose("mine", []).config.title == "Built on quickstart"  # found by the variable alone
    (work / "new").mkdir()
    assert "tunebook plan other --recipes-dir new" in init("other", "mine", recipes_dirs=[Path("new")])
    assert compose("new/other.yaml", []).config.title == "Built on mine"  # a file of its own
