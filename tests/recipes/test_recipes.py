"""Every recipe: it composes, leaves the user's group choices free, and holds its source's settings."""

import dataclasses
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from omegaconf import OmegaConf

from tunebook.config.book import book_root, find_recipes
from tunebook.config.compose import compose
from tunebook.config.recipe_files import RecipeFile, load_recipes
from tunebook.config.schema import GROUPS, RunConfig

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
# Two choices of each group with the value that each sets, so that one of them differs from the recipe's own.
CHOICES: dict[str, dict[str, Any]] = {
    "model.name": {"qwen25_7b": "Qwen/Qwen2.5-7B", "qwen25_05b": "Qwen/Qwen2.5-0.5B"},
    "dataset.name": {"infinity_instruct": "BAAI/Infinity-Instruct", "alpaca_cleaned": "yahma/alpaca-cleaned"},
    "parallelism.strategy": {"hsdp": "hsdp", "ddp": "ddp"},
    "hardware.generation": {"turing": "turing", "hopper": "hopper"},
    "precision.compute": {"fp16": "fp16", "bf16": "bf16"},
    "attention.implementation": {"eager": "eager", "flex_attention": "flex_attention"},
    "packing.mode": {"isolated": "isolated", "padded": "padded"},
    "activation.checkpointing": {"stored": "disabled", "checkpointing": "enabled"},
    "peft.method": {"qlora": "qlora", "full": "full"},
    "optimizer.name": {"adamw_8bit": "adamw_8bit", "paged_adamw_8bit": "paged_adamw_8bit"},
    "schedule.name": {"linear": "linear", "constant": "constant"},
    "launcher.name": {"local": "local", "slurm": "slurm"},
    "tracking.name": {"trackio": "trackio", "wandb": "wandb"},
    "evaluation.tasks": {"none": [], "quickstart": ["book:recipes/quickstart/tasks/quickstart.yaml"]},
}


@cache
def config_of(name: str) -> RunConfig:
    return compose(name, []).config


@cache
def written(name: str) -> RecipeFile:
    return load_recipes(name, [])[-1]


def value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config.name if isinstance(config, Enum) else config


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested mapping by their dotted keys."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        inner = leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
        found |= inner
    return found


# ---- what holds for all recipes


def test_the_books_recipes_are_all_found() -> None:
    assert len(NAMES) >= 14
    assert list(find_recipes([])) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_composes(name: str) -> None:
    config = config_of(name)
    assert config.recipe == name
    assert config.title and len(config.title) < 100
    assert (config.training.global_samples is None) != (config.training.global_tokens is None)


@pytest.mark.parametrize("file", RECIPES, ids=NAMES)
def test_is_a_global_package_that_ends_with_itself(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].endswith(f"card: recipes/{file.stem}/README.md")
    defaults: Any = OmegaConf.to_container(OmegaConf.load(file))
    assert defaults["defaults"][-1] == "_self_"


@pytest.mark.parametrize("name", NAMES)
def test_body_sets_no_key_that_decides_a_group_choice(name: str) -> None:
    assert sorted(set(leaves(written(name).body)) & set(DECIDING)) == []


@pytest.mark.parametrize("name", NAMES)
def test_body_sets_only_keys_that_every_choice_of_the_group_has(name: str) -> None:
    # A key of one choice's own schema would make `parallelism=ddp` or `launcher=local` fail to compose.
    for group in set(written(name).body) & set(GROUPS):
        own = {field.name for field in dataclasses.fields(get_type_hints(RunConfig)[group])}
        assert sorted(set(written(name).body[group]) - own) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_group_choice_on_the_command_line_beats_the_recipe(name: str) -> None:
    own = compose(name, []).groups
    chosen = {
        key: next(choice for choice in choices if choice != own[key.split(".")[0]]) for key, choices in CHOICES.items()
    }
    typed = {key.split(".")[0]: choice for key, choice in chosen.items()}
    composition = compose(name, [f"{group}={choice}" for group, choice in typed.items()])
    assert {group: composition.groups[group] for group in GROUPS} == typed
    expected = {key: CHOICES[key][choice] for key, choice in chosen.items()}
    assert {key: value_at(composition.config, key) for key in CHOICES} == expected


@pytest.mark.parametrize("name", NAMES)
def test_body_holds_only_values_that_differ(name: str, tmp_path: Path) -> None:
    content: Any = OmegaConf.to_container(OmegaConf.load(book_root() / "recipes" / f"{name}.yaml"))
    bare = tmp_path / f"{name}_without_body.yaml"
    OmegaConf.save(OmegaConf.create({"defaults": content["defaults"]}), bare)
    without = compose(bare.stem, [], [tmp_path]).config
    # The reference machine is a statement about the source, so it is stated whole.
    values = [key for key in leaves(written(name).body) if not key.startswith("hardware.reference.")]
    assert [key for key in values if value_at(without, key) == value_at(config_of(name), key)] == []


@pytest.mark.parametrize("name", NAMES)
def test_states_the_machine_of_its_source(name: str) -> None:
    reference = config_of(name).hardware.reference
    assert reference.generation.name not in {"auto"}
    assert (reference.memory_gib is None) == (reference.generation.name == "cpu")


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_exact")])
def test_leaves_the_machine_to_decide_what_its_source_did_not(name: str) -> None:
    groups = compose(name, []).groups
    open_groups = {"hardware", "precision", "attention", "packing", "activation"}
    chosen = {group: groups[group] for group in open_groups if groups[group] != "auto"}
    assert chosen == ({"precision": "fp8"} if name == "llama3_8b_fp8" else {})


# ---- the settings of the sources, value by value

SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3b_zero2": {
        "model.name": "Qwen/Qwen2.5-3B",
        "model.liger_kernel": False,  # a choice of kernels, which the machine decides
        "dataset.name": "BAAI/Infinity-Instruct",
        "dataset.subset": "0625",
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 1e-5,
        "optimizer.weight_decay": 0.0,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
        "schedule.name": "cosine_with_min_lr",
        "schedule.min_learning_rate": 0.0,
        "schedule.warmup_steps": 40,
        "training.max_grad_norm": 1.0,
        "training.num_epochs": 3,
        "training.global_samples": 528,
        "training.max_length": 1024,
        "parallelism.strategy": "zero2",
        "parallelism.overlap_comm": None,  # off: DeepSpeed's default below stage 3
        "parallelism.allgather_bucket_size": None,  # 5e8: DeepSpeed's default
        "parallelism.reduce_bucket_size": None,  # by the Trainer
        "parallelism.round_robin_gradients": True,
        "parallelism.offload_optimizer": "none",
        "hardware.reference.generation": "volta",
        "hardware.reference.gpus_per_node": 8,
    },
    "qwen3b_zero2_exact": {
        "hardware.generation": "volta",
        "hardware.gpus_per_node": 8,
        "model.liger_kernel": True,
        "precision.compute": "fp32",
        "packing.mode": "padded",
        "activation.checkpointing": "enabled",
        "training.micro_batch_size": 11,
        "training.global_samples": 11 * 6 * 8,
    },
    "qwen05b_single": {
        "model.name": "Qwen/Qwen2.5-0.5B",
        "model.liger_kernel": False,
        "optimizer.learning_rate": 1e-5,
        "schedule.warmup_steps": None,
        "schedule.warmup_share": 0.01,
        "training.global_samples": 528,
        "parallelism.strategy": "single",
        "hardware.reference.gpus_per_node": 1,
    },
    "llama2_70b_fsdp": {
        "model.name": "meta-llama/Llama-2-70b-chat-hf",
        "dataset.name": "smangrul/code-chat-assistant-v1",
        "dataset.format": "text",
        "dataset.text_field": "content",
        "dataset.train_split": "train",
        "dataset.validation_split": "test",
        "training.max_length": 2048,
        "training.max_steps": 500,
        "training.log_every_steps": 25,
        "training.evaluate_every_steps": 100,
        "training.save_every_steps": 250,
        "training.seed": 100,
        "training.global_tokens": 16 * 2048,
        "training.micro_batch_size": 1,
        "training.max_grad_norm": 1.0,
        "training.push_to_hub": None,
        "optimizer.learning_rate": 5e-5,
        "optimizer.weight_decay": 0.01,
        "schedule.name": "cosine",
        "schedule.warmup_share": 0.03,
        "parallelism.strategy": "fsdp",
        "parallelism.wrap_classes": [],
        "parallelism.state_dict": "sharded",
        "parallelism.cpu_ram_efficient_loading": True,
        "parallelism.offload_parameters": "none",
        "launcher.name": "slurm",
        "launcher.timeout_s": 5400,
        "hardware.num_nodes": 2,
        "hardware.reference.generation": "ampere",
        "hardware.reference.gpus_per_node": 8,
        "hardware.reference.memory_gib": 80,
    },
    "llama2_70b_fsdp_1node": {
        "hardware.num_nodes": 1,
        "hardware.reference.gpus_per_node": 8,
        "parallelism.strategy": "fsdp",
        "parallelism.offload_parameters": "cpu",
        "training.global_tokens": 16 * 2048,
    },
    "zero1_lora": {
        "parallelism.strategy": "zero1",
        "peft.method": "lora",
        "peft.rank": 8,
        "peft.alpha": 16,
        "peft.dropout": 0.05,
        "optimizer.learning_rate": 5e-5,
        "optimizer.weight_decay": 1e-4,
        "schedule.name": "cosine",
        "schedule.warmup_steps": None,
        "schedule.warmup_share": None,
        "training.num_epochs": 5,
        "training.max_length": 2048,
        "training.save_every_steps": 2000,
        "training.global_samples": 1 * 2 * 4,
        "hardware.reference.gpus_per_node": 4,
    },
    "zero2_lora": {
        "parallelism.strategy": "zero2",
        "parallelism.offload_optimizer": "cpu",
        "parallelism.offload_parameters": "none",
        "parallelism.pin_memory": None,  # true: DeepSpeed's default
        "parallelism.overlap_comm": True,
        "parallelism.allgather_bucket_size": None,  # 5e8: DeepSpeed's default
        "parallelism.reduce_bucket_size": 500_000_000,
        "parallelism.round_robin_gradients": True,
    },
    "zero3_lora": {
        "parallelism.strategy": "zero3",
        "parallelism.offload_optimizer": "cpu",
        "parallelism.offload_parameters": "cpu",
        # true, true and 1e9: DeepSpeed's defaults, which a test of parallel/ holds against the package
        "parallelism.pin_memory": None,
        "parallelism.overlap_comm": None,
        "parallelism.max_live_parameters": None,
        "parallelism.max_reuse_distance": None,
        "parallelism.sub_group_size": None,
        "parallelism.gather_weights_on_save": True,
        "parallelism.reduce_bucket_size": None,
        "parallelism.prefetch_bucket_size": None,
        "parallelism.param_persistence_threshold": None,
    },
    "dolly3b_ray_zero3_offload": {
        "model.name": "databricks/dolly-v2-3b",
        "dataset.name": "yahma/alpaca-cleaned",
        "parallelism.strategy": "zero3",
        "parallelism.offload_parameters": "cpu",
        "parallelism.offload_optimizer": "cpu",
        "launcher.name": "ray",
        "launcher.cpus_per_worker": 28,
        "hardware.num_nodes": 1,
        "hardware.reference.gpus_per_node": 1,
    },
    "dolly3b_zero3_nvme": {
        "parallelism.strategy": "zero3",
        "parallelism.offload_parameters": "nvme",
        "parallelism.offload_optimizer": "nvme",
        "parallelism.nvme_path": "/local_nvme",
        "launcher.name": "local",
    },
    "llama3_8b_ddp": {
        "model.name": "meta-llama/Meta-Llama-3-8B",
        "model.facts.num_parameters": 8_030_261_248,
        "parallelism.strategy": "ddp",
        "peft.method": "full",
        "training.global_samples": 16,
        "hardware.reference.gpus_per_node": 8,
    },
    "llama3_8b_fsdp_offload": {
        "parallelism.strategy": "fsdp",
        "parallelism.offload_parameters": "cpu",
        "parallelism.state_dict": "sharded",
        "parallelism.cpu_ram_efficient_loading": True,
        "training.micro_batch_size": 1,
        "hardware.reference.generation": "ada",
        "hardware.reference.gpus_per_node": 2,
        "hardware.reference.memory_gib": 24,
    },
    "llama3_8b_fp8": {
        "precision.compute": "fp8",
        "precision.master_weights": "auto",  # fp32 for what is trained
        "parallelism.strategy": "fsdp",
        "precision.fp8_scaling": "tensorwise",
        "model.compile_layers": None,  # auto compiles, without which fp8 would be slower than bf16
        "attention.implementation": "auto",
        "parallelism.cpu_ram_efficient_loading": True,
        "hardware.reference.generation": "hopper",
        "hardware.reference.gpus_per_node": 8,
    },
    "qwen3_4b_lora": {
        "model.name": "Qwen/Qwen3-4B",
        "dataset.name": "yahma/alpaca-cleaned",
        "parallelism.strategy": "single",
        "peft.method": "lora",
        "peft.rank": 8,
        "peft.alpha": 16,
        "peft.dropout": 0.0,
        "peft.target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 3e-4,
        "optimizer.weight_decay": 0.01,
        "schedule.name": "cosine",
        "schedule.warmup_steps": 100,
        "training.num_epochs": 1,
        "training.global_samples": 2 * 8,
        "hardware.reference.gpus_per_node": 1,
    },
    "qwen3_4b_long": {
        "model.name": "Qwen/Qwen3-4B",
        "dataset.name": "emozilla/pg19",
        "dataset.overlong": "split",
        "parallelism.strategy": "fsdp",
        "parallelism.sequence_group_size": 2,
        "peft.method": "full",
        "optimizer.learning_rate": 2e-5,
        "optimizer.weight_decay": 0.0,
        "schedule.name": "linear",
        "training.global_tokens": 1_048_576,
        "training.max_length": 32_768,
        "training.max_steps": 12,
    },
    "qwen3_8b_fsdp": {
        "model.name": "Qwen/Qwen3-8B",
        "dataset.name": "yahma/alpaca-cleaned",
        "parallelism.strategy": "fsdp",
        "peft.method": "full",
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 5e-6,
        "schedule.name": "constant",
        "schedule.warmup_steps": None,
        "schedule.warmup_share": None,
        "training.num_epochs": 1,
        "training.global_samples": 2 * 8 * 4,
    },
    "qwen3_30b_a3b_fsdp": {
        "model.name": "Qwen/Qwen3-30B-A3B",
        "dataset.name": "yahma/alpaca-cleaned",
        "parallelism.strategy": "fsdp",
        "peft.method": "full",
        "optimizer.learning_rate": 5e-6,
        "schedule.name": "constant",
        "training.num_epochs": 1,
        "training.global_samples": 2 * 8 * 4,
    },
    "gemma3_4b_lora": {
        "model.name": "google/gemma-3-4b-it",
        "dataset.name": "philschmid/gretel-synthetic-text-to-sql",
        "dataset.max_documents": 10_000,
        "parallelism.strategy": "single",
        "peft.method": "lora",
        "peft.rank": 16,
        "peft.alpha": 16,
        "peft.dropout": 0.05,
        "peft.target_modules": [],  # all linear layers
        "optimizer.learning_rate": 2e-4,
        "schedule.name": "constant",
        "training.max_length": 512,
        "training.num_epochs": 3,
        "training.max_grad_norm": 0.3,
        "training.global_samples": 1 * 4,
    },
    "olmo3_7b_tulu3": {
        "model.name": "allenai/Olmo-3-1025-7B",
        "dataset.name": "allenai/tulu-3-sft-mixture",
        "dataset.max_documents": None,
        "dataset.overlong": "cut",
        "parallelism.strategy": "fsdp",
        "peft.method": "full",
        "optimizer.learning_rate": 5e-6,
        "optimizer.weight_decay": 0.0,
        "schedule.name": "linear",
        "schedule.warmup_share": 0.03,
        "training.max_length": 4096,
        "training.num_epochs": 2,
        "training.seed": 123,
        "training.global_samples": 64 * 1 * 2,
        "hardware.num_nodes": 1,
        "hardware.reference.gpus_per_node": 8,
    },
    "gpt_oss_20b_lora": {
        "model.name": "unsloth/gpt-oss-20b-BF16",
        "dataset.name": "HuggingFaceH4/Multilingual-Thinking",
        "dataset.reasoning": "keep",
        "parallelism.strategy": "single",
        "peft.rank": 8,
        "peft.alpha": 16,
        "optimizer.learning_rate": 2e-4,
        "schedule.name": "cosine_with_min_lr",
        "schedule.warmup_share": 0.03,
        "schedule.min_learning_rate": None,
        "schedule.min_learning_rate_share": 0.1,
        "training.max_length": 2048,
        "training.num_epochs": 1,
        "training.global_samples": 4 * 4,
        "hardware.reference.generation": "hopper",
        "hardware.reference.gpus_per_node": 1,
        "hardware.reference.memory_gib": 80,
    },
    "llama31_8b_tools": {
        "model.name": "meta-llama/Llama-3.1-8B-Instruct",
        "dataset.name": "llamafactory/glaive_toolcall_en",
        "parallelism.strategy": "single",
        "peft.method": "lora",
        "peft.rank": 8,
        "peft.target_modules": [],  # all linear layers
        "optimizer.learning_rate": 1e-4,
        "schedule.name": "cosine",
        "schedule.warmup_share": 0.1,
        "training.max_length": 2048,
        "training.num_epochs": 3,
        "training.global_samples": 1 * 8,
    },
    "llama2_70b_lora_mlperf": {
        "model.name": "meta-llama/Llama-2-70b-hf",
        "model.facts.max_position_embeddings": 8192,
        "dataset.name": "regisss/scrolls_gov_report_preprocessed_mlperf_2",
        "dataset.train_split": "train",
        "dataset.validation_split": "validation",
        "parallelism.strategy": "zero3",
        "parallelism.offload_optimizer": "none",
        "parallelism.offload_parameters": "none",
        "peft.method": "lora",
        "peft.rank": 16,
        "peft.alpha": 32,
        "peft.dropout": 0.1,
        "precision.master_weights": "bf16",
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 4e-4,
        "optimizer.weight_decay": 1e-4,
        "schedule.name": "cosine",
        "schedule.warmup_steps": None,
        "schedule.warmup_share": None,
        "training.max_length": 8192,
        "training.max_steps": 1024,
        "training.max_grad_norm": 0.3,
        "training.seed": 1234,
        "training.log_every_steps": 24,
        "training.evaluate_every_steps": 48,
        "training.global_samples": 1 * 8,
        "hardware.reference.generation": "ampere",
        "hardware.reference.gpus_per_node": 8,
        "hardware.reference.memory_gib": 80,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_has_the_settings_of_its_source(name: str) -> None:
    config = config_of(name)
    assert {key: value_at(config, key) for key in SETTINGS[name]} == SETTINGS[name]


def test_every_reproduction_is_compared_with_its_source() -> None:
    own = {"quickstart", "smollm2_135m_boolq", "smollm2_135m_lora", "smollm2_135m_tools"}
    assert set(SETTINGS) == set(NAMES) - own


def differences(one: str, other: str) -> set[str]:
    """The dotted keys in which two recipes differ."""
    first, second = (leaves(dataclasses.asdict(config_of(name))) for name in (one, other))
    return {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)} - {"recipe", "title"}


def test_one_node_of_70b_differs_from_two_in_nodes_and_offloading_only() -> None:
    assert differences("llama2_70b_fsdp", "llama2_70b_fsdp_1node") == {
        "hardware.num_nodes",
        "parallelism.offload_parameters",
    }


@pytest.mark.parametrize("name", ["zero2_lora", "zero3_lora"])
def test_lora_recipes_differ_in_the_stage_only(name: str) -> None:
    assert {key.split(".")[0] for key in differences("zero1_lora", name)} == {"parallelism"}
