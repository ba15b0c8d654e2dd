"""Every file of hydra_configs composes, sets its group's main key, and repeats no defaults."""

import dataclasses
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tunebook.config import choices
from tunebook.config.book import book_root, resolve_path
from tunebook.config.compose import compose
from tunebook.config.keys import settings_of
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import GROUPS, ModelConfig, RunConfig
from tunebook.model.load import architecture_from_facts, auto_class
from tunebook.model.parameters import active_parameters
from tunebook.plan.architecture import with_layers

CONFIGS = book_root() / "hydra_configs"
FILES = sorted(CONFIGS.glob("*/*.yaml"))
IDS = [f"{file.parent.name}/{file.stem}" for file in FILES]
CHOICES_OF = {group: [file.stem for file in FILES if file.parent.name == group] for group in GROUPS}

# What only the user can say, and an example of it.
MUST_SAY = {"evaluation/tasks": ("evaluation.tasks", "[gsm8k]")}
# The keys by which the files of a group differ: each file answers them, even where the answer is the schema's default.
DECIDES = {
    "model": {"name", "path"},
    "dataset": {"source"},
    "method": {"name"},
    "parallelism": {"strategy"},
    "hardware": {"generation"},
    "precision": {"compute"},
    "attention": {"implementation"},
    "packing": {"mode"},
    "activation": {"checkpointing"},
    "peft": {"method"},
    "optimizer": {"name"},
    "schedule": {"name"},
    "launcher": {"name"},
    "tracking": {"name"},
    "evaluation": {"tasks"},
}
# Groups where every word of a closed set has a file of its own name.
COMPLETE = {
    "hardware": choices.Generation,
    "parallelism": choices.Strategy,
    "precision": choices.Compute,
    "attention": choices.Attention,
    "packing": choices.PackingMode,
    "peft": choices.PeftMethod,
    "optimizer": choices.OptimizerName,
    "schedule": choices.ScheduleName,
    "launcher": choices.LauncherName,
    "tracking": choices.TrackerName,
}


@cache
def section(place: str) -> Any:
    """The section of a run with this choice. Models are read without Hydra, which takes a quarter of a second."""
    group, choice = place.split("/")
    if group == "model":
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), body(CONFIGS / f"{place}.yaml")))
    return getattr(composed(CHOICES_OF[group].index(choice)), group)


@cache
def composed(number: int) -> RunConfig:
    """A run with the choice of this number in every group but `model`."""
    words = [f"{group}={names[number % len(names)]}" for group, names in CHOICES_OF.items() if group != "model"]
    needed = [f"{MUST_SAY[place][0]}={MUST_SAY[place][1]}" for place in MUST_SAY if place.replace("/", "=") in words]
    return compose(None, ["model=quickstart", *words, *needed]).config


def body(file: Path) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    content.pop("defaults", None)
    return dict(content.get(file.parent.name, content))  # a method sets values of other groups, too


def test_folders_are_the_groups() -> None:
    assert {folder.name for folder in CONFIGS.iterdir() if folder.is_dir()} == set(GROUPS)


@pytest.mark.parametrize(("group", "words"), COMPLETE.items(), ids=COMPLETE)
def test_every_choice_has_a_file_that_sets_it(group: str, words: type[Enum]) -> None:
    (key,) = DECIDES[group]
    for word in words:
        assert getattr(section(f"{group}/{word.name}"), key) is word


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_does_not_repeat_a_default_of_the_schema(file: Path) -> None:
    group = file.parent.name
    schema = type(section(f"{group}/{file.stem}"))
    repeated = [
        key for key, value in body(file).items() if key not in DECIDES[group] and not _differs(schema, key, value)
    ]
    assert repeated == []


def _differs(schema: type, key: str, value: Any) -> bool:
    assert dataclasses.is_dataclass(schema)
    field = next(field for field in dataclasses.fields(schema) if field.name == key)
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return bool((default.name if isinstance(default, Enum) else default) != value)


def test_book_paths_lead_to_files_of_the_book() -> None:
    words = [word for file in FILES for word in _strings(body(file)) if word.startswith("book:")]
    assert words
    shipped = [word for word in words if not word.startswith("book:inputs/")]  # the rest is made by scripts
    assert [word for word in shipped if not resolve_path(word).exists()] == []


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [word for child in value.values() for word in _strings(child)]
    if isinstance(value, list):
        return [word for child in value for word in _strings(child)]
    return [value] if isinstance(value, str) else []


# ---- the facts of the models

MODELS = [file.stem for file in sorted(CONFIGS.glob("model/*.yaml")) if "facts" in body(file)]
# The parameters of the weights on the hub. A tied output head counts once, though some files store it again.
PUBLISHED = {
    "dolly_v2_3b": 2_775_086_080, "gemma3_12b": 12_187_325_040, "gemma3_1b": 999_885_952, "gemma3_27b": 27_432_406_640,
    "gemma3_270m": 268_098_176,
    "gemma3_4b": 4_300_079_472, "gemma4_12b": 11_959_730_224, "gemma4_26b_a4b": 25_805_936_206,
    "gemma4_31b": 31_273_088_876, "gemma4_e2b": 5_123_178_051, "gemma4_e4b": 7_996_156_490,
    "glm4_9b": 9_400_279_040, "gpt_oss_20b": 20_914_757_184,
    "llama2_70b": 68_976_648_192, "llama2_70b_chat": 68_976_648_192,
    "llama31_70b": 70_553_706_496, "llama31_8b": 8_030_261_248,
    "llama32_1b": 1_235_814_400, "llama32_3b": 3_212_749_824, "llama33_70b": 70_553_706_496,
    "llama3_8b": 8_030_261_248, "mistral_7b": 7_248_023_552, "mistral_7b_base": 7_241_732_096,
    "mistral_small_24b": 23_572_403_200,
    "olmo3_7b": 7_298_011_136, "olmo3_7b_base": 7_298_011_136,
    "olmoe_1b_7b": 6_919_161_856, "phi4": 14_659_507_200, "qwen25_05b": 494_032_768,
    "qwen25_vl_3b": 3_754_622_976, "qwen25_vl_7b": 8_292_166_656, "qwen3_vl_4b": 4_437_815_808,
    "qwen3_vl_8b": 8_767_123_696, "smolvlm2_500m": 507_482_304,
    "qwen25_3b": 3_085_938_688, "qwen25_7b": 7_615_616_512, "qwen3_06b": 596_049_920, "qwen3_14b": 14_768_307_200,
    "qwen3_1_7b": 1_720_574_976, "qwen3_30b_a3b": 30_532_122_624, "qwen3_32b": 32_762_123_264,
    "qwen3_4b": 4_022_468_096, "qwen3_8b": 8_190_735_360, "smollm2_135m": 134_515_008, "smollm2_1_7b": 1_711_376_384,
    "smollm2_360m": 361_821_120, "smollm3_3b": 3_075_098_624,
}  # fmt: skip


# Published numbers that are no parameters here: a scale of each layer, the image tower's means and deviations, and
# the keys and values of layers that take those of earlier ones (products of the hidden size, and a norm of keys).
NO_PARAMETERS = {
    "gemma4_12b": 48, "gemma4_26b_a4b": 30 + 2 * 1152, "gemma4_31b": 60 + 2 * 1152,
    "gemma4_e2b": 35 + 16 * (2 * 1536 * 256 + 256) + 4 * (2 * 1536 * 512 + 512),
    "gemma4_e4b": 42 + 15 * (2 * 2560 * 2 * 256 + 256) + 3 * (2 * 2560 * 2 * 512 + 512),
}  # fmt: skip


def facts_of(model: str) -> ModelFacts:
    facts: ModelFacts = section(f"model/{model}").facts
    return facts


@pytest.mark.parametrize("model", MODELS)
def test_facts_are_those_of_the_published_weights(model: str) -> None:
    facts = facts_of(model)
    assert facts.num_parameters == PUBLISHED[model] - NO_PARAMETERS.get(model, 0)
    assert all(getattr(facts, setting.name) is not None for setting in settings_of(ModelFacts))
    assert facts.dtype in {"float32", "float16", "bfloat16"}
    assert "head_dim" in str(facts.config) or facts.hidden_size % facts.num_attention_heads == 0
    assert facts.num_attention_heads % facts.num_key_value_heads == 0
    assert f"`{model}`" in (book_root() / "docs" / "data.md").read_text()


@pytest.mark.parametrize(
    ("model", "active"),
    [  # all but the experts that a token does not meet: layers x experts not chosen x three matrices
        ("qwen3_30b_a3b", PUBLISHED["qwen3_30b_a3b"] - 48 * (128 - 8) * 3 * 2048 * 768),
        ("gpt_oss_20b", PUBLISHED["gpt_oss_20b"] - 24 * (32 - 4) * (3 * 2880 * 2880 + 3 * 2880)),  # and biases
        # without the image tower, and what projects its output
        ("gemma4_26b_a4b", 25_233_141_760 - 30 * (128 - 8) * 3 * 2816 * 704),
        # the embeddings of each layer are rows to look up; the layers, norms, words and one product for all layers
        ("gemma4_e2b", 4_628_569_344 - 262_144 * 35 * 256),
    ],
)
def test_a_token_meets_some_of_the_experts(model: str, active: int) -> None:
    assert active_parameters(with_layers(facts_of(model))) == active


@pytest.mark.parametrize(
    ("model", "full", "sliding", "window"),
    [  # layers x heads x head size
        ("gemma3_1b", 4 * 4 * 256, 22 * 4 * 256, 512),  # each sixth layer attends to the whole document
        ("gpt_oss_20b", 12 * 64 * 64, 12 * 64 * 64, 128),
        ("mistral_7b", 32 * 4096, 0, 0),  # without the window of version 0.1
        ("gemma4_31b", 10 * 32 * 512, 50 * 32 * 256, 1024),
    ],
)
def test_layers_attend_to_the_document_or_to_a_window(model: str, full: int, sliding: int, window: int) -> None:
    layers = with_layers(facts_of(model)).measured
    assert layers is not None
    assert (layers.attention_width, layers.sliding_width, layers.sliding_window) == (full, sliding, window)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=[] if model in ("llama31_8b", "qwen3_30b_a3b") else [pytest.mark.nightly])
        for model in MODELS
    ],
)
def test_parameters_are_those_of_the_architecture_itself(model: str) -> None:
    import torch

    facts = facts_of(model)
    config = architecture_from_facts(facts)
    with torch.device("meta"):
        architecture = auto_class(config).from_config(config)
    assert type(architecture).__name__ == facts.architecture
    assert sum(parameter.numel() for parameter in architecture.parameters()) == facts.num_parameters
    unknown = [key for key in flat_keys(facts.config) if not key_exists(config, key)]
    assert not unknown, "transformers takes any key, and ignores those that it does not have"


def flat_keys(stated: dict[str, Any], place: str = "") -> Iterator[str]:
    for key, value in stated.items():
        yield from flat_keys(value, f"{place}{key}.") if isinstance(value, dict) else [place + key]


def key_exists(config: Any, key: str) -> bool:
    """Whether the class of the config has the key, or has replaced it by another; it keeps unknown keys as they are."""
    *parts, name = key.split(".")
    for part in parts:
        config = getattr(config, part)
    if name == "head_dim":  # which models of any architecture read
        return True
    return hasattr(type(config)(), name) or not hasattr(config, name)
