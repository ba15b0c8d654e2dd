"""Names of other tools are answered with words that can be typed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tunebook.cli.app import app
from tunebook.config.compose import compose
from tunebook.config.foreign import instead_of, names
from tunebook.config.messages import type_of
from tunebook.config.schema import GROUPS
from tunebook.config.walk import all_keys
from tunebook.errors import RequestError

# Values by how `type_of` begins; everything else is text.
EXAMPLES = {"a whole number": "2", "a number": "0.1", "true or false": "true", "a list": "x"}


def advised(what: str) -> list[str]:
    """The words of an entry, with a value where one belongs."""
    return [] if what.startswith("(") else what.partition(" (")[0].split(" ")


def with_value(word: str) -> str:
    key = word.partition("=")[0]
    described = type_of(key)
    if described.startswith("one of "):
        value = described.removeprefix("one of ").split(",")[0]
    else:
        value = next((value for start, value in EXAMPLES.items() if described.startswith(start)), "x")
    return re.sub(r"=N$", "=8", word.replace("{value}", value))


def together(requests: list[list[str]]) -> list[list[str]]:
    """Requests of different groups in one run, since composing takes a while."""
    runs: list[list[str]] = []
    for words in requests:
        groups = {re.split(r"[.=]", word)[0] for word in words}
        run = next((run for run in runs if not groups & {re.split(r"[.=]", word)[0] for word in run}), None)
        if run is None:
            runs.append(list(words))
        else:
            run += words
    return runs


def test_what_people_are_told_to_type_composes() -> None:
    settings = names()["settings"]
    requests = {tuple(map(with_value, advised(what))) for what in settings.values()}
    for words in together([list(words) for words in sorted(requests)]):
        compose("quickstart", words)
    own = {name for name in settings if "=" not in name and name not in GROUPS and name in all_keys()}
    assert not own, "names of Tunebook's own"
    typed = [*names()["commands"].values(), *names()["options"].values()]
    commands: Any = typer.main.get_command(app)
    assert {advised(what)[1] for what in typed if what.startswith("tunebook ")} <= set(commands.commands)


def test_the_table_of_the_page_is_what_is_answered(project_root: Path) -> None:
    page = (project_root / "docs" / "coming_from.md").read_text(encoding="utf-8")
    table = page.partition("## The most used settings")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| (?:`(.+?)`)?", table, re.MULTILINE)
    assert len(rows) > 50
    assert [name for name, what in rows if " ".join(advised(names()["settings"][name])) != what] == []


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("learning_rate=1e-4", "; type optimizer.learning_rate=1e-4"),
        ("training.num_train_epochs=3", "; type training.num_epochs=3"),
        ("bf16=False", "; type precision=auto"),
        ("lora_target_modules=[q_proj,v_proj]", "; type peft=lora 'peft.target_modules=[q_proj,v_proj]' ("),
        ("zero_optimization.stage=3", "; type parallelism=zero3"),
        ("neftune_noise_alpha=5", " (not offered"),
        ("learning_ratee=1", ""),
    ],
)
def test_a_setting_is_answered_with_what_to_type(word: str, instead: str) -> None:
    key, _, value = word.partition("=")
    answer = instead_of(key, value)
    assert answer.startswith(instead) and bool(answer) == bool(instead)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["packing=true"], "type packing=isolated"),
        (["optimizer=adam_w"], "Did you mean 'adamw'"),
        (["model=Qwen/Qwen2.5-0.5B"], "type model=hub model.name=Qwen/Qwen2.5-0.5B"),
        (["+lr=1e-4"], "type optimizer.learning_rate=1e-4"),
        (["hydra.run.dir=/x"], "type outputs=/x"),
        (["bf16=true", "lora_r=4"], "type peft=lora peft.rank=4"),
    ],
)
def test_composing_answers_with_what_to_type(words: list[str], instead: str) -> None:
    with pytest.raises(RequestError, match=re.escape(instead)):
        compose("quickstart", words)


def test_key_of_another_choice_is_not_foreign() -> None:
    with pytest.raises(RequestError, match=r"parallelism\.overlap_comm has no meaning with parallelism=ddp"):
        compose("quickstart", ["parallelism=ddp", "parallelism.overlap_comm=true"])


def test_a_key_in_a_recipe_is_answered_with_the_recipes_value(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# @package _global_\ntraining:\n  save_total_limit: 3\n")
    with pytest.raises(RequestError, match=r"mine\.yaml: .*type training\.keep_checkpoints=3"):
        compose("mine", [], [tmp_path])


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("sft quickstart training.seed=3", "type tunebook train quickstart training.seed=3"),
        ("quickstart training.max_steps=3", "type tunebook train quickstart training.max_steps=3"),
        ("train quickstart --learning-rate=1e-4", "type optimizer.learning_rate=1e-4"),
        ("train quickstart -lr 1e-4", "type optimizer.learning_rate=1e-4"),
        ("train quickstart --max_steps -1", "type training.max_steps=null"),
        ("train quickstart --training.max_steps 20", "type training.max_steps=20"),
        ("train quickstart --bf16 --dry-run", "type precision=bf16"),
        ("train quickstart --multirun training.seed=0,1", "type tunebook sweep"),
        ("train quickstart --dry-rn", "--dry-run"),
        ("eval --model org/name", "type model=org/name"),
        ("tain quickstart", "'train'"),
    ],
)
def test_a_command_line_is_answered_with_what_to_type(words: str, instead: str) -> None:
    command = [sys.executable, "-m", "tunebook", *shlex.split(words)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert instead in result.stderr
