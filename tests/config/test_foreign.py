"""Names of other tools are answered with words that can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tunebook.config.compose import compose
from tunebook.config.foreign import instead_of, names
from tunebook.config.keys import all_keys
from tunebook.config.schema import GROUPS
from tunebook.errors import RequestError


def advised(name: str) -> list[str]:
    """The words that are suggested for a name without a value."""
    sentence = instead_of(*name.partition("=")[::2])
    return shlex.split(sentence.partition(": type ")[2].partition(" (")[0])


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


def test_every_suggestion_composes_as_it_is_printed() -> None:
    requests = {tuple(advised(name)) for name in names()}
    for words in together([list(words) for words in sorted(requests)]):
        compose("quickstart", words)
    own = {name for name in names() if "=" not in name and name not in GROUPS and name in all_keys()}
    assert not own, "names of Tunebook's own"


def test_the_table_of_the_page_is_what_is_answered(project_root: Path) -> None:
    page = (project_root / "docs" / "coming_from.md").read_text(encoding="utf-8")
    table = page.partition("## The most used settings")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| (?:`(.+?)`)?", table, re.MULTILINE)
    assert len(rows) > 50
    assert [name for name, typed in rows if " ".join(advised(name)) != typed] == []


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("learning_rate=1e-4", "learning_rate is optimizer.learning_rate: type optimizer.learning_rate=1e-4"),
        ("training.num_train_epochs=3", "training.num_train_epochs is training.num_epochs: type training.num_epochs=3"),
        ("bf16=False", "there is no key 'bf16': type precision=auto"),
        (
            "lora_target_modules=[q_proj,v_proj]",
            "lora_target_modules is peft.target_modules: type peft=lora 'peft.target_modules=[q_proj,v_proj]' (",
        ),
        ("zero_optimization.stage=3", "there is no key 'zero_optimization.stage': type parallelism=zero3"),
        ("load_in_8bit=false", "there is no key 'load_in_8bit': leave it out"),
        ("adapter=null", "there is no key 'adapter': leave it out"),
        ("max_steps=null", "max_steps is training.max_steps: type training.max_steps=null"),
        ("use_dora=false", "use_dora is peft.use_dora: type peft=lora peft.use_dora=false"),
        ("neftune_noise_alpha=5", "there is no key 'neftune_noise_alpha': not offered"),
        ("learning_ratee=1", ""),
        ("training.seed=1", ""),
    ],
)
def test_a_setting_is_answered_with_what_to_type(word: str, instead: str) -> None:
    answer = instead_of(*word.partition("=")[::2])
    assert answer.startswith(instead) and bool(answer) == bool(instead)


@pytest.mark.parametrize(
    "word",
    [
        *(
            "rpo_alpha=0.0",
            "dpo_loss_type=simpo",
            "val_set_size=500",
            "save_steps=0.1",
            "max_grad_norm=0",
            "warmup_steps=none",
            "loss_type=[sigmoid,sft]",
            "datasets=[{path:chats.jsonl}]",
        ),
        "lora_target_modules=null",
    ],
)
def test_a_value_that_does_not_fit_is_not_suggested(word: str) -> None:
    name, _, value = word.partition("=")
    said, _, answer = instead_of(name, value).partition(": ")
    assert said.endswith(f"cannot be {value}")
    assert f"={value}" not in answer and f"[{value}]" not in answer


@pytest.mark.parametrize("key", ["lora_target", "peft.target_modules"])
def test_values_with_commas_of_a_list_are_answered_with_the_list(key: str) -> None:
    with pytest.raises(RequestError, match=r"'peft\.target_modules=\[q_proj,v_proj\]'"):
        compose("quickstart", [f"{key}=q_proj,v_proj"])


def test_a_value_of_another_tool_is_not_taken_for_a_misspelling() -> None:
    with pytest.raises(RequestError, match=r"there is no 'dpo': type method=dpo method\.loss_type=sigmoid"):
        compose("quickstart", ["method=dpo", "method.loss_type=dpo"])
