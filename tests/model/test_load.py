"""Loading the initial model of a run: random weights, weights of a folder, and errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tunebook.config.choices import Attention, Weights
from tunebook.config.compose import compose
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.hardware.detect import Machine
from tunebook.model.load import (
    architecture_from_facts,
    attention_option,
    check_model,
    load_architecture,
    load_model,
)
from tunebook.plan.auto.resolve import resolve_auto

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def folder(tmp_path: Path, project_root: Path) -> Path:
    """The quickstart's architecture, much smaller, without weights."""
    copy = tmp_path / "model"
    shutil.copytree(project_root / "recipes" / "quickstart" / "model", copy)
    config = json.loads((copy / "config.json").read_text()) | SIZES | {"num_key_value_heads": 1}
    config.pop("layer_types", None)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.fixture
def config(folder: Path) -> RunConfig:
    composed = compose("quickstart", [f"model.path={folder}"]).config
    return resolve_auto(composed, NO_GPU).config


@pytest.fixture
def with_weights(config: RunConfig, folder: Path) -> RunConfig:
    load_model(config).save_pretrained(folder)
    config.model.weights = Weights.pretrained
    return config


def same(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_random_weights_are_the_seeds(config: RunConfig) -> None:
    first = load_model(config)
    torch.rand(100)
    assert same(first, load_model(config))
    config.training.seed += 1
    assert not same(first, load_model(config))


def test_a_folders_weights_come_back(with_weights: RunConfig, folder: Path) -> None:
    assert same(load_model(with_weights), load_model(with_weights))
    stored = load_file(folder / "model.safetensors")
    loaded = load_model(with_weights).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("name", [None, "consolidated.safetensors", "model-00001-of-00002.safetensors"])
def test_a_folder_without_weights_is_refused(config: RunConfig, folder: Path, name: str | None) -> None:
    """Also one with weights that transformers does not look for: under another name, or shards without their index."""
    config.model.weights = Weights.pretrained
    if name is not None:
        save_file({"weight": torch.zeros(2)}, folder / name)
    with pytest.raises(RequestError) as caught:
        load_model(config)
    assert caught.value.problem_id == "model-without-weights"


def test_a_folder_without_a_config_is_refused(config: RunConfig, tmp_path: Path) -> None:
    config.model.path = str(tmp_path)
    with pytest.raises(RequestError, match=r"config.json"):
        check_model(config.model)
    config.model.path = str(tmp_path / "nix")
    with pytest.raises(RequestError, match="nix"):
        check_model(config.model)


def test_weights_that_do_not_fill_the_model_are_refused(with_weights: RunConfig, folder: Path) -> None:
    file = folder / "model.safetensors"
    stored = load_file(file)
    stored.pop("model.layers.1.mlp.up_proj.weight")
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"1 missing keys such as model.layers.1.mlp.up_proj.weight"):
        load_model(with_weights)
    stored["extra.weight"] = torch.zeros(2)
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"1 unexpected keys such as extra\.weight"):
        load_model(with_weights)


def test_another_architecture_than_planned_is_refused(config: RunConfig) -> None:
    assert config.model.facts is not None
    config.model.facts.num_layers = 7
    with pytest.raises(RequestError, match=r"num_layers=7 \(config.json: 2\)"):
        load_architecture(config.model)


def test_planned_facts_are_enough_for_random_weights_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose("qwen05b_single", ["model.weights=random"]).config
    architecture = load_architecture(config.model)
    assert (architecture.num_hidden_layers, architecture.vocab_size, architecture.model_type) == (24, 151936, "qwen2")


def test_without_a_hub_pretrained_weights_say_how_to_work_offline() -> None:
    config = compose("qwen05b_single", ["model.revision=v1"]).config
    with pytest.raises(RequestError, match=r"hf download Qwen/Qwen2.5-0.5B --revision v1 --local-dir DIR.*path=DIR"):
        load_architecture(config.model)


def test_an_unknown_architecture_is_named() -> None:
    facts = ModelFacts(
        architecture="NixForCausalLM",
        num_parameters=1,
        num_layers=1,
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=8,
        max_position_embeddings=8,
        tie_word_embeddings=True,
        dtype="float32",
    )
    with pytest.raises(RequestError, match="NixForCausalLM is not known"):
        architecture_from_facts(facts)


def test_a_kernel_is_asked_of_the_part_that_computes_text_only() -> None:
    """Gemma 4's part for sound has no sdpa."""
    from transformers import AutoModelForCausalLM

    facts = compose(None, ["model=gemma4_e2b"]).config.model.facts
    assert facts is not None
    architecture = architecture_from_facts(facts)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, attn_implementation=attention_option(Attention.sdpa))
    tower = model.model.audio_tower.config
    assert (model.config.text_config._attn_implementation, tower._attn_implementation) == ("sdpa", "eager")
