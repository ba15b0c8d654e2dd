"""Names of other tools are answered with words that can be typed."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

import pytest

from tunebook.config.compose import compose
from tunebook.config.foreign import instead_of, names
from tunebook.config.keys import all_keys
from tunebook.config.schema import GROUPS

EXAMPLES = {"int": "2", "float": "0.1", "bool": "true"}  # values of a type; of everything else a text


def advised(what: str) -> list[str]:
    """The words of an entry, with a value where one belongs."""
    return [] if what.startswith("(") else what.partition(" (")[0].split(" ")


def with_value(word: str) -> str:
    """The word with a value that its key accepts."""
    setting = all_keys().get(word.partition("=")[0])
    value = "a/x"
    if setting is not None:
        kind = str(setting.type).removesuffix(" | None")
        value = setting.default.name if isinstance(setting.default, Enum) else EXAMPLES.get(kind, "a/x")
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
    settings = names()
    requests = {tuple(map(with_value, advised(what))) for what in settings.values()}
    for words in together([list(words) for words in sorted(requests)]):
        compose("quickstart", words)
    own = {name for name in settings if "=" not in name and name not in GROUPS and name in all_keys()}
    assert not own, "names of Tunebook's own"


def test_the_table_of_the_page_is_what_is_answered(project_root: Path) -> None:
    page = (project_root / "docs" / "coming_from.md").read_text(encoding="utf-8")
    table = page.partition("## The most used settings")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| (?:`(.+?)`)?", table, re.MULTILINE)
    assert len(rows) > 50
    assert [name for name, what in rows if " ".join(advised(names()[name])) != what] == []


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
