"""Every file of hydra_configs composes, sets its group's main key, and repeats no defaults."""

import dataclasses
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tunebook.config import choices
from tunebook.config.book import book_root, resolve_path
from tunebook.config.compose import compose
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import GROUPS, RunConfig
from tunebook.config.walk import field_types
from tunebook.errors import RequestError

CONFIGS = book_root() / "hydra_configs"
FILES = sorted(CONFIGS.glob("*/*.yaml"))
IDS = [f"{file.parent.name}/{file.stem}" for file in FILES]

# What only the user can say, and an example of it.
MUST_SAY = {"evaluation/tasks": ("evaluation.tasks", "[gsm8k]")}
# The keys by which the files of a group differ: each file answers them, even where the answer is the schema's default.
DECIDES = {
    "model": {"name", "path"},
    "dataset": {"source"},
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
def composed(place: str) -> RunConfig:
    group, choice = place.split("/")
    others = {"model": "quickstart", "dataset": "synthetic"}
    words = [f"{other}={name}" for other, name in others.items() if other != group]
    needed = [f"{MUST_SAY[place][0]}={MUST_SAY[place][1]}"] if place in MUST_SAY else []
    return compose(None, [*words, f"{group}={choice}", *needed]).config


def body(file: Path) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    content.pop("defaults", None)
    return dict(content)


def test_folders_are_the_groups() -> None:
    assert {folder.name for folder in CONFIGS.iterdir() if folder.is_dir()} == set(GROUPS)


@pytest.mark.parametrize("place", IDS)
def test_composes(place: str) -> None:
    group = place.split("/")[0]
    assert dataclasses.is_dataclass(getattr(composed(place), group))


@pytest.mark.parametrize("place", MUST_SAY)
def test_asks_for_what_only_the_user_knows(place: str) -> None:
    group, choice = place.split("/")
    others = {"model": "quickstart", "dataset": "synthetic"}
    words = [f"{other}={name}" for other, name in others.items() if other != group]
    with pytest.raises(RequestError, match=MUST_SAY[place][0]):
        compose(None, [*words, f"{group}={choice}"])


@pytest.mark.parametrize(("group", "words"), COMPLETE.items(), ids=COMPLETE)
def test_every_choice_has_a_file_that_sets_it(group: str, words: type[Enum]) -> None:
    (key,) = DECIDES[group]
    for word in words:
        assert getattr(getattr(composed(f"{group}/{word.name}"), group), key) is word


def test_activation_is_a_plain_word_for_each_switch() -> None:
    switches = {
        name: composed(f"activation/{name}").activation.checkpointing.name
        for name in ("auto", "checkpointing", "stored")
    }
    assert switches == {"auto": "auto", "checkpointing": "enabled", "stored": "disabled"}


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_opens_with_a_sentence_for_the_reader(file: Path) -> None:
    first = file.read_text().splitlines()[0]
    assert first.startswith("# ") and len(first) > 20


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_does_not_repeat_a_default_of_the_schema(file: Path) -> None:
    group = file.parent.name
    schema = type(getattr(composed(f"{group}/{file.stem}"), group))
    repeated = [
        key for key, value in body(file).items() if key not in DECIDES[group] and not _differs(schema, key, value)
    ]
    assert repeated == []


def _differs(schema: type, key: str, value: Any) -> bool:
    assert dataclasses.is_dataclass(schema)
    field = next(field for field in dataclasses.fields(schema) if field.name == key)
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return bool((default.name if isinstance(default, Enum) else default) != value)


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_answers_the_decision_of_its_group(file: Path) -> None:
    group = file.parent.name
    config = getattr(composed(f"{group}/{file.stem}"), group)
    assert any(getattr(config, key) is not None for key in DECIDES[group]) or file.stem == "hub"


def test_only_the_users_own_data_has_no_place_yet() -> None:
    open_ones = set()
    for file in CONFIGS.glob("dataset/*.yaml"):
        config = composed(f"dataset/{file.stem}").dataset
        if not {"files": config.path, "hub": config.name}.get(config.source.name, "generated"):
            open_ones.add(file.stem)
    assert open_ones == {"jsonl", "hub"}


def test_book_paths_lead_to_files_of_the_book() -> None:
    words = [word for file in FILES for word in _strings(body(file)) if word.startswith("book:")]
    assert words
    assert [word for word in words if not resolve_path(word).exists()] == []


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [word for child in value.values() for word in _strings(child)]
    if isinstance(value, list):
        return [word for child in value for word in _strings(child)]
    return [value] if isinstance(value, str) else []


# ---- the facts of the models

MODELS = [file.stem for file in sorted(CONFIGS.glob("model/*.yaml")) if "facts" in body(file)]
MODEL_TYPES = {"Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama", "GPTNeoXForCausalLM": "gpt_neox"}


def facts_of(model: str) -> ModelFacts:
    facts = composed(f"model/{model}").model.facts
    assert facts is not None
    return facts


def counted(facts: ModelFacts) -> int:
    """The parameters of a decoder by hand: embeddings, then attention, feed-forward part and norms of each layer."""
    hidden, inner = facts.hidden_size, facts.intermediate_size
    keys = hidden // facts.num_attention_heads * facts.num_key_value_heads
    embeddings = facts.vocab_size * hidden * (1 if facts.tie_word_embeddings else 2)
    if facts.architecture == "GPTNeoXForCausalLM":  # biases everywhere, two matrices forward, LayerNorm
        attention = hidden * 3 * hidden + 3 * hidden + hidden * hidden + hidden
        forward = hidden * inner + inner + inner * hidden + hidden
        return embeddings + facts.num_layers * (attention + forward + 2 * 2 * hidden) + 2 * hidden
    bias = hidden + 2 * keys if facts.architecture == "Qwen2ForCausalLM" else 0
    attention = hidden * (hidden + 2 * keys) + bias + hidden * hidden
    return embeddings + facts.num_layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden


@pytest.mark.parametrize("model", MODELS)
def test_parameters_add_up_from_the_sizes(model: str) -> None:
    assert facts_of(model).num_parameters == counted(facts_of(model))


@pytest.mark.parametrize("model", MODELS)
def test_facts_are_complete(model: str) -> None:
    facts = facts_of(model)
    assert all(getattr(facts, name) is not None for name in field_types(ModelFacts))
    assert facts.measured is not None and facts.measured.num_layers == facts.num_layers, "the book ships its trace"
    assert facts.dtype in {"float32", "float16", "bfloat16"}
    assert facts.hidden_size % facts.num_attention_heads == 0
    assert facts.num_attention_heads % facts.num_key_value_heads == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_of_the_architecture_itself(model: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = facts_of(model)
    names = {"num_layers": "num_hidden_layers"}
    sizes = {names.get(name, name): getattr(facts, name) for name in field_types(ModelFacts)}
    for name in ("architecture", "num_parameters", "dtype"):
        del sizes[name]
    config = AutoConfig.for_model(MODEL_TYPES[facts.architecture], **sizes)
    with torch.device("meta"):
        architecture = AutoModelForCausalLM.from_config(config)
    assert type(architecture).__name__ == facts.architecture
    assert sum(parameter.numel() for parameter in architecture.parameters()) == facts.num_parameters
