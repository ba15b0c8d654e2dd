"""Every recipe: it composes, leaves the user's group choices free, and writes only what differs from the defaults.

The values of every recipe are in tests/golden/runs.yaml.
"""

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from omegaconf import OmegaConf

from tunebook.config.book import book_root, find_recipes
from tunebook.config.compose import compose
from tunebook.config.identity import flat
from tunebook.config.recipe_files import load_recipes
from tunebook.config.schema import GROUPS, RunConfig

from .conftest import Composed

RECIPES = sorted((book_root() / "recipes").glob("*.yaml"))
NAMES = [file.stem for file in RECIPES]

# The keys that say which choice of a group it is. A recipe that set one in its body would beat the user's
# `group=choice`, so it may only choose by `override /group: choice`.
DECIDING = (
    "model.name", "model.path", "dataset.source", "dataset.path", "dataset.name", "parallelism.strategy",
    "parallelism.offload_optimizer", "parallelism.offload_parameters", "hardware.generation", "precision.compute",
    "attention.implementation", "packing.mode", "activation.checkpointing", "peft.method", "optimizer.name",
    "schedule.name", "launcher.name", "tracking.name", "evaluation.tasks",
)  # fmt: skip
# packing=auto looks at the first document for images, and theirs are on the hub, or not drawn yet.
OF_IMAGES = ("digits", "gemma3_4b_vision_lora", "qwen25_vl_3b_lora")
IN_FP32 = ("smollm2_135m_dpo",)  # for what it measures; its card says why
# A choice of each group with the value that it sets.
CHOICES: dict[str, tuple[str, Any]] = {
    "model.name": ("qwen25_7b", "Qwen/Qwen2.5-7B"),
    "dataset.name": ("pg19", "emozilla/pg19"),
    "parallelism.strategy": ("hsdp", "hsdp"),
    "hardware.generation": ("turing", "turing"),
    "precision.compute": ("fp16", "fp16"),
    "attention.implementation": ("eager", "eager"),
    "packing.mode": ("padded", "padded"),
    "activation.checkpointing": ("stored", "disabled"),
    "peft.method": ("qlora", "qlora"),
    "optimizer.name": ("adamw_8bit", "adamw_8bit"),
    "schedule.name": ("constant_with_warmup", "constant_with_warmup"),
    "launcher.name": ("slurm", "slurm"),
    "tracking.name": ("wandb", "wandb"),
    "evaluation.tasks": ("none", []),
}


def value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config.name if isinstance(config, Enum) else config


def test_the_books_recipes_are_all_found() -> None:
    assert len(NAMES) >= 14
    assert list(find_recipes([])) == NAMES


@pytest.mark.parametrize("file", RECIPES, ids=NAMES)
def test_composes_and_states_the_machine_of_its_source(file: Path, composed: Composed) -> None:
    lines = file.read_text().splitlines()
    assert (lines[0], lines[1].endswith(f"card: recipes/{file.stem}/README.md")) == ("# @package _global_", True)
    config, groups = composed(file.stem).config, composed(file.stem).groups
    assert config.recipe == file.stem
    assert config.title and len(config.title) < 100
    assert (config.training.global_samples is None) != (config.training.global_tokens is None)
    reference = config.hardware.reference
    assert reference.generation.name != "auto"
    assert (reference.memory_gib is None) == (reference.generation.name == "cpu")
    if not file.stem.endswith("_exact"):  # what its source did not decide is left to the machine
        decided = {group for group in ("hardware", "precision", "attention", "packing") if groups[group] != "auto"}
        has_precision = file.stem.endswith("_fp8") or file.stem in IN_FP32
        pinned = {"precision"} if has_precision else {"packing"} if file.stem in OF_IMAGES else set()
        assert decided == pinned


@pytest.mark.parametrize("name", NAMES)
def test_body_leaves_the_choice_of_each_group_to_the_user(name: str) -> None:
    body = load_recipes(name, [])[-1].body
    assert {key for key, _ in flat(body)} & set(DECIDING) == set()
    # A key of one choice's own schema would make `parallelism=ddp` or `launcher=local` fail to compose. A recipe's data
    # are of its method alone.
    for group in set(body) & set(GROUPS) - {"method"}:
        own = {field.name for field in dataclasses.fields(get_type_hints(RunConfig)[group])}
        assert set(body[group]) <= own


@pytest.mark.parametrize("name", NAMES)
def test_a_group_choice_on_the_command_line_beats_the_recipe(name: str) -> None:
    config = compose(name, [f"{key.split('.')[0]}={choice}" for key, (choice, _) in CHOICES.items()]).config
    assert {key: value_at(config, key) for key in CHOICES} == {key: value for key, (_, value) in CHOICES.items()}


@pytest.mark.parametrize("name", NAMES)
def test_body_holds_only_values_that_differ(name: str, tmp_path: Path, composed: Composed) -> None:
    content: Any = OmegaConf.to_container(OmegaConf.load(book_root() / "recipes" / f"{name}.yaml"))
    bare = tmp_path / f"{name}_without_body.yaml"
    OmegaConf.save(OmegaConf.create({"defaults": content["defaults"]}), bare)
    without = compose(bare.stem, [], [tmp_path]).config
    # The reference machine is a statement about the source, so it is stated whole.
    keys = [key for key, _ in flat(load_recipes(name, [])[-1].body) if not key.startswith("hardware.reference.")]
    assert [key for key in keys if value_at(without, key) == value_at(composed(name).config, key)] == []


@pytest.mark.parametrize(
    ("one", "other", "keys"),
    [
        ("llama2_70b_fsdp", "llama2_70b_fsdp_1node", {"hardware.num_nodes", "parallelism.offload_parameters"}),
        ("zero1_lora", "zero2_lora", {"parallelism"}),
        ("zero1_lora", "zero3_lora", {"parallelism"}),
    ],
)
def test_twins_differ_only_in_these_keys(one: str, other: str, keys: set[str], composed: Composed) -> None:
    first, second = (dict(flat(dataclasses.asdict(composed(name).config))) for name in (one, other))
    different = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
    assert {key if key in keys else key.split(".")[0] for key in different - {"recipe", "title"}} == keys
