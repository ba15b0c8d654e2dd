"""What evaluation and chat share; loading a run's folder is tried in chat/test_loading.py and test_worker.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunebook.config.choices import Attention, Compute, Generation, Weights
from tunebook.config.compose import compose
from tunebook.config.schema import ModelConfig, RunConfig
from tunebook.evaluate.bound_model import (
    compute_dtype,
    load_padded_tokenizer,
    load_trained,
    stop_ids,
    tokenizer_of_run,
    uses_gpu,
)


@pytest.fixture
def config() -> RunConfig:
    config = compose("quickstart", []).config
    config.attention.implementation = Attention.flash_attention_2
    config.precision.compute = Compute.fp32
    config.hardware.generation = Generation.cpu
    return config


@pytest.mark.parametrize(("named", "expected"), [(None, [2]), (0, [0, 2]), ([7, 2], [2, 7])])
def test_generation_stops_at_what_was_trained_and_at_what_the_model_names(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, named: Any, expected: list[int]
) -> None:
    assert model.generation_config is not None
    model.generation_config.eos_token_id = named
    assert tokenizer.eos_token_id == 2
    assert stop_ids(model, tokenizer) == expected


@pytest.mark.parametrize(
    ("compute", "dtype"),
    [
        (Compute.fp32, None),
        (Compute.bf16, torch.bfloat16),
        (Compute.fp8, torch.bfloat16),
        (Compute.fp16, torch.float16),
    ],
)
def test_products_are_computed_as_in_training(config: RunConfig, compute: Compute, dtype: torch.dtype | None) -> None:
    config.precision.compute = compute
    assert compute_dtype(config) is dtype


def test_a_run_made_for_a_cpu_stays_there(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not uses_gpu(config)
    config.hardware.generation = Generation.hopper
    assert uses_gpu(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not uses_gpu(config)


def test_without_a_folder_it_is_what_training_starts_from_and_with_one_that_folders(
    config: RunConfig, tmp_path: Path
) -> None:
    start: Any = load_trained(config, None)
    assert start.config._attn_implementation == "sdpa"  # packed rows' kernels have no cache
    trained: Any = load_trained(config, None)
    with torch.no_grad():
        trained.model.norm.weight.fill_(2.0)
    trained.save_pretrained(tmp_path)
    loaded: Any = load_trained(config, tmp_path)
    assert loaded.model.norm.weight.tolist() == [2.0] * 192
    assert torch.equal(loaded.model.embed_tokens.weight, start.model.embed_tokens.weight)
    assert config.model.weights is Weights.random  # the run's own configuration is left as it is


def test_the_tokenizer_beside_the_weights_is_the_runs(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    base = ModelConfig(path="/somewhere/base", trust_remote_code=True)
    assert tokenizer_of_run(base, None) is base
    assert tokenizer_of_run(base, tmp_path) is base  # a checkpoint without one
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_of_run(base, tmp_path) == ModelConfig(path=str(tmp_path), trust_remote_code=True)


def test_rows_are_padded_with_the_end_of_text_where_there_is_no_padding_token(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    own = load_padded_tokenizer(ModelConfig(path="book:recipes/quickstart/model"))
    assert own.pad_token == tokenizer.pad_token != tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": None}))
    assert load_padded_tokenizer(ModelConfig(path=str(tmp_path))).pad_token == tokenizer.eos_token
