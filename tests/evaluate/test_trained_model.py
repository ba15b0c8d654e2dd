"""What evaluation and chat share; loading a run's folder is tested in test_chat.py and test_worker.py."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from tests.evaluate.conftest import cpu_run
from tunebook.config.choices import Attention, Compute, Generation, Weights
from tunebook.config.schema import AttentionConfig, HardwareConfig, ModelConfig, PrecisionConfig, RunConfig
from tunebook.errors import DoesNotFitError
from tunebook.evaluate import trained_model
from tunebook.evaluate.trained_model import (
    load_to_answer,
    load_trained,
    model_identity,
    tokenizer_of_run,
    uses_gpu,
)


def test_a_run_made_for_a_cpu_stays_there(cpu_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = cpu_run(hardware=HardwareConfig(generation=Generation.hopper, gpus_per_node=1))
    for is_available in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_available=is_available: is_available)
        assert not uses_gpu(cpu_config)
        assert uses_gpu(hopper) is is_available


def test_a_model_is_that_of_its_folder_or_the_one_that_training_starts_from(tmp_path: Path) -> None:
    config = cpu_run(attention=AttentionConfig(implementation=Attention.flash_attention_2))
    start: Any = load_trained(config, None)
    assert start.config._attn_implementation == "sdpa"  # packed rows' kernels have no cache
    first = start.model.embed_tokens.weight.detach().clone()
    with torch.no_grad():
        start.model.norm.weight.fill_(2.0)
    start.save_pretrained(tmp_path)
    loaded: Any = load_trained(config, tmp_path)
    assert loaded.model.norm.weight.tolist() == [2.0] * 192
    assert torch.equal(loaded.model.embed_tokens.weight, first)
    assert config.model.weights is Weights.random  # the run's own configuration is unchanged


def test_the_tokenizer_next_to_the_weights_is_used(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    base = ModelConfig(path="/somewhere/base", trust_remote_code=True)
    assert tokenizer_of_run(base, None) is base
    assert tokenizer_of_run(base, tmp_path) is base  # a checkpoint without one
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_of_run(base, tmp_path) == ModelConfig(path=str(tmp_path), trust_remote_code=True)


def test_a_part_that_stays_on_the_host_is_refused(cpu_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(hf_device_map={"embed": 0, "lm_head": "cpu"})
    monkeypatch.setattr(trained_model, "load_trained", lambda *_, **__: model)
    monkeypatch.setattr(trained_model, "uses_gpu", lambda _: True)
    with pytest.raises(DoesNotFitError):
        load_to_answer(cpu_config, None, is_sharded=True)


def test_a_copy_has_the_same_identity_and_other_content_has_not(tmp_path: Path, cpu_config: RunConfig) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    for name in ("config.json", "generation_config.json", "README.md"):
        (tmp_path / name).write_text("content")
    before = model_identity(cpu_config, tmp_path)
    os.utime(tmp_path / "model.safetensors", (0, 0))
    (tmp_path / "README.md").write_text("changed")
    assert model_identity(cpu_config, tmp_path) == before
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text("CONTENT")
        assert model_identity(cpu_config, tmp_path) != before
        (tmp_path / name).write_text("content")
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert model_identity(cpu_config, tmp_path) != before


@pytest.mark.parametrize("is_adapter", [False, True])
def test_random_weights_differ_by_seed_and_formats(is_adapter: bool, tmp_path: Path, cpu_config: RunConfig) -> None:
    folder = tmp_path if is_adapter else None
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_text("adapter")
    first = model_identity(cpu_config, folder)
    assert model_identity(cpu_config, folder) == first
    other_seed = replace(cpu_config, training=replace(cpu_config.training, seed=cpu_config.training.seed + 1))
    other_format = replace(cpu_config, precision=PrecisionConfig(compute=Compute.bf16))
    assert model_identity(other_seed, folder) != first
    assert model_identity(other_format, folder) != first
    (tmp_path / "adapter_model.safetensors").write_text("another adapter")
    assert (model_identity(cpu_config, folder) == first) is not is_adapter
